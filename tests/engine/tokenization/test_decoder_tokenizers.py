"""Decoders pool their last token, so the ids must end exactly as transformers ends them, also after a cut."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.tokenization.model_tokenizer import Truncation
from penstock.engine.tokenization.tokenizer import TokenizerPool

TEXTS = ["a", "the cat sat on a mat", "naïve café", " one  two ", ""]
CONFIG = {"architectures": ["LlamaModel"], "hidden_size": 8, "vocab_size": 400, "num_attention_heads": 2}
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
QWEN_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def sentencepiece_like(template: str) -> Tokenizer:
    """A tokenizer as that of Llama, Mistral and Gemma: words marked by a bar, bytes for what is not known."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "at"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "a"), ("a", "t")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def byte_level(end: str | None) -> Tokenizer:
    """A tokenizer as that of Qwen; Qwen3-Embedding's template ends each text with <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    if end is not None:
        ids = [(end, tokenizer.token_to_id(end))]
        template = processors.TemplateProcessing(single=f"$A {end}", pair=f"$A $B {end}", special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


# What the folder holds, and the token that a text ends with (None: none is added).
STYLES = {
    "e5-mistral": (
        "mistral",
        sentencepiece_like("<s> $A </s>"),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True, **LLAMA_TOKENS},
        "</s>",
    ),
    "llama": ("llama", sentencepiece_like("<s> $A"), {"tokenizer_class": "LlamaTokenizerFast", **LLAMA_TOKENS}, None),
    "llama-3": (
        "llama",
        sentencepiece_like("<s> $A </s>"),
        {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left", **LLAMA_TOKENS},
        "</s>",
    ),
    "embedding-gemma": (
        "gemma3_text",
        sentencepiece_like("<s> $A </s>"),
        {"tokenizer_class": "GemmaTokenizer", "add_eos_token": True, "truncation_side": "left", **LLAMA_TOKENS},
        None,
    ),
    "qwen3-embedding": (
        "qwen3",
        byte_level("<|endoftext|>"),
        {"tokenizer_class": "Qwen2Tokenizer", "padding_side": "left", "add_bos_token": False, **QWEN_TOKENS},
        "<|endoftext|>",
    ),
    "qwen2": ("qwen2", byte_level(None), {"tokenizer_class": "Qwen2TokenizerFast", **QWEN_TOKENS}, None),
}


def save(folder: Path, model_type: str, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    """Writes a model folder without weights."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    return folder


@pytest.mark.parametrize("style", STYLES)
async def test_ids_are_those_of_transformers(style: str, tmp_path: Path) -> None:
    model_type, tokenizer, config, end = STYLES[style]
    folder = save(tmp_path, model_type, tokenizer, config)
    reference: Any = AutoTokenizer.from_pretrained(folder)
    spec = load_tokenizer(resolve_model(EngineConfig(model=str(folder))))
    pool = TokenizerPool(spec, vocab_size=400, do_lower_case=False, num_workers=1)
    try:
        whole = await pool.encode(TEXTS, Truncation(max_num_tokens=1000))
        assert [t.token_ids.tolist() for t in whole] == reference(TEXTS)["input_ids"]
        if end is not None:
            assert {t.token_ids[-1] for t in whole} == {tokenizer.token_to_id(end)}
        for limit in (2, 3, 7):
            for side in (None, "left", "right"):
                cut = await pool.encode(TEXTS, Truncation(max_num_tokens=limit, cut=True, side=side))
                reference.truncation_side = side or config.get("truncation_side", "right")
                expected = reference(TEXTS, truncation=True, max_length=limit)["input_ids"]
                assert [t.token_ids.tolist() for t in cut] == expected
    finally:
        pool.close()


def test_an_end_that_is_asked_for_and_not_given_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True, **LLAMA_TOKENS}
    folder = save(tmp_path, "llama", sentencepiece_like("<s> $A"), config)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        load_tokenizer(resolve_model(EngineConfig(model=str(folder))))
    assert "add_eos_token" in caplog.text
    caplog.clear()
    save(tmp_path, "llama", sentencepiece_like("<s> $A </s>"), config)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        load_tokenizer(resolve_model(EngineConfig(model=str(folder))))
    assert "add_eos_token" not in caplog.text
