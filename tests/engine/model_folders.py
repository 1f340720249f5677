"""Small random models with vectors of tokens or sparse vectors, in the folders of their libraries."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.protocol.config import EngineConfig

from ..tables import table

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), *".,!?-[]", "dam", "gate"]
QUERIES = ["what dam", "a gate, or a dam?"]
DOCUMENTS = table(__file__, "documents")


async def start(folder: Path, device: str = "cpu") -> AsyncEngine:
    settings = {"device": device, "in_process": True, "num_threads": 1, "dtype": "float32"}
    return await AsyncEngine.start(EngineConfig(model=str(folder), **settings))


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def change_json(path: Path, change: dict[str, Any]) -> None:
    write_json(path, json.loads(path.read_text()) | change)


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Writes modules.json with the type and the folder of each module."""
    entries = [{"idx": i, "name": str(i), "path": path, "type": name} for i, (name, path) in enumerate(modules)]
    write_json(folder / "modules.json", entries)


def write_backbone(folder: Path, class_name: str = "BertModel", **config: Any) -> None:
    """A tiny random encoder and a tokenizer for it."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = table(__file__, "sizes_of_the_small_model") | {"vocab_size": len(vocabulary)}
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**sizes | config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def write_splade(folder: Path, class_name: str, settings: dict[str, Any] | None = None, **pooling: Any) -> Path:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48} if class_name.startswith("Distil") else {}
    write_backbone(folder, class_name, **sizes)
    base = "sentence_transformers.sparse_encoder"
    write_modules(folder, (f"{base}.models.MLMTransformer", ""), (f"{base}.models.SpladePooling", "1_SpladePooling"))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
    write_json(folder / "1_SpladePooling" / "config.json", pooling)
    config = {"model_type": "SparseEncoder", "prompts": {}, "similarity_fn_name": "dot"} | (settings or {})
    write_json(folder / "config_sentence_transformers.json", config)
    return folder


def write_m3(folder: Path) -> Path:
    write_backbone(folder, "XLMRobertaModel", max_position_embeddings=80)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    write_modules(folder, *((f"sentence_transformers.models.{kind}", path) for kind, path in kinds.items()))
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})
    torch.manual_seed(3)
    for name, width in (("sparse_linear", 1), ("colbert_linear", 32)):
        torch.save(torch.nn.Linear(32, width).state_dict(), folder / f"{name}.pt")
    return folder
