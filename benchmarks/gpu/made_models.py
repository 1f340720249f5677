"""Encoders of real sizes with random weights, as folders for penstock and sentence-transformers. Nothing is fetched.

Every word of server/bench/words.txt is one token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from loads import WORDS
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.layers.weights import Fusion
from penstock.engine.executors.torch.packed_batch import PackedBatch, PackedModel
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import TokenizedInput

from .phases import Bench
from .shapes import VOCABULARY_SIZE, Shape

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_FIRST_ID = len(_SPECIAL)


def model_folder(shape: Shape, bench: Bench) -> Path:
    """Returns the folder of a random model with these sizes. Creates it if it does not exist."""
    folder = bench.folder / shape.name
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "1_Pooling").mkdir(parents=True)
        _write_weights(shape, part, bench.device)
        _write_configs(shape, part)
        _write_tokenizer(shape, part)
        part.rename(folder)
    return folder


def load_made(
    shape: Shape, bench: Bench, *, device: str | None = None, dtype: str = "bfloat16", fusion: Fusion | None = None
) -> PackedModel:
    """Loads the model as the engine does; on a CPU always with torch."""
    info = resolve_model(EngineConfig(model=str(model_folder(shape, bench))))
    return load_model(with_device(info, device or str(bench.device), dtype), fusion=fusion)


def pack(lengths: list[int], device: torch.device) -> PackedBatch:
    """Returns sequences of random token ids with `lengths`."""
    numbers = torch.Generator().manual_seed(0)
    inputs = [
        TokenizedInput(torch.randint(_FIRST_ID, VOCABULARY_SIZE, (n,), generator=numbers, dtype=torch.int32).numpy())
        for n in lengths
    ]
    return PackedBatch.build(inputs, device)


def _write_weights(shape: Shape, folder: Path, device: torch.device) -> None:
    numbers = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, mean: float = 0.0) -> Tensor:
        return (mean + 0.02 * torch.randn(sizes, generator=numbers, device=device)).to(torch.bfloat16).cpu()

    width, inner = shape.width, shape.inner
    sizes = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (inner, width),
        "output.dense": (width, inner),
    }
    tensors = {
        "embeddings.word_embeddings.weight": normal(VOCABULARY_SIZE, width),
        "embeddings.position_embeddings.weight": normal(shape.max_tokens, width),
        "embeddings.token_type_embeddings.weight": normal(2, width),
    }
    norms = ["embeddings.LayerNorm"]
    for block in (f"encoder.layer.{i}" for i in range(shape.layers)):
        norms += [f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"]
        for name, (outputs, inputs) in sizes.items():
            tensors[f"{block}.{name}.weight"] = normal(outputs, inputs)
            tensors[f"{block}.{name}.bias"] = normal(outputs)
    for name in norms:
        tensors[f"{name}.weight"] = normal(width, mean=1.0)
        tensors[f"{name}.bias"] = normal(width)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write_configs(shape: Shape, folder: Path) -> None:
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "gelu",
        "pad_token_id": 0,
    }
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")))
    ]
    pooling = {"word_embedding_dimension": shape.width, "pooling_mode_mean_tokens": True}
    (folder / "2_Normalize").mkdir()
    for name, content in (
        ("config.json", config),
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": shape.max_tokens, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))


def _write_tokenizer(shape: Shape, folder: Path) -> None:
    words = [*_SPECIAL, *dict.fromkeys(WORDS)]
    words += [f"[unused{i}]" for i in range(VOCABULARY_SIZE - len(words))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in _SPECIAL}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_tokens, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
