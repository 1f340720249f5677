"""Small random models with vectors of tokens or sparse vectors, in the folders of their libraries."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.protocol.config import EngineConfig

from ...tables import table

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
