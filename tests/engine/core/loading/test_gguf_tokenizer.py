"""Tokenizers built from the metadata of GGUF equal those of transformers, from which the metadata was written."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import BertTokenizerFast, Qwen2TokenizerFast, XLMRobertaTokenizerFast

from penstock.engine.core.loading.gguf_tokenizer import build_gguf_tokenizer
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import UnsupportedModelError

from ....gguf_files import write_gguf
from ....tables import cases

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
PIECES = [*"éÉﬁ中文\u0301\u200b😀▁\n\t AZ9", "[CLS]", "<s>", "<mask>", "<|endoftext|>", "<|im_end|>", "<think>", "the"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def texts():
    numbers = random.Random(0)
    return ["", *("".join(numbers.choices([*PIECES, *LETTERS, " "], k=numbers.randint(1, 30))) for _ in range(300))]


def write(path, kind, tokens, types, **values):
    keys = {"model": kind, "tokens": tokens, "token_type": np.array(types, np.int32)} | values
    metadata = {"general.architecture": "bert"} | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    write_gguf(path, metadata, {})
    return build_gguf_tokenizer(path)


def assert_equal(found, expected):
    for text in texts():
        for pair in (None, "a pair"):
            ours = found.backend.encode(*(part for part in (text, pair) if part is not None))
            theirs = expected(text, pair, return_token_type_ids=True)
            assert ours.ids == theirs["input_ids"], repr(text)
            if "token_type_ids" in expected.model_input_names:
                assert ours.type_ids == theirs["token_type_ids"]
    names = expected.special_tokens_map
    assert {name: found.special_tokens_map.get(name) for name in names} == names


@pytest.mark.parametrize("is_cased", [False, True])
@pytest.mark.parametrize("has_options", [False, True])
def test_word_piece_equals_that_of_transformers(is_cased, has_options, tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    upper = ["A", "É", "##Z"] if is_cased else []
    words = [*special, *LETTERS, "the", "é", "中", "ﬁ", "9", "▁", *upper, *(f"##{x}" for x in (*LETTERS, "the", "9"))]
    expected = BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}, do_lower_case=not is_cased)
    tokens = [w if w in special else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    options = {"normalizer.lowercase": not is_cased} if has_options else {}
    ids = {"bos_token_id": 2, "eos_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0, "mask_token_id": 4}
    types = [CONTROL] * 5 + [NORMAL] * (len(words) - 5)
    found = write(tmp_path / "m.gguf", "bert", tokens, types, seperator_token_id=3, **ids, **options)
    assert_equal(found, expected)


@pytest.mark.parametrize("ends", [("<|endoftext|>", {"add_eos_token": True}), (None, {})])
def test_bpe_equals_that_of_transformers(ends, tmp_path):
    end, flags = ends
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "Ã©"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©")]
    tokens = [*symbols, "<|endoftext|>", "<|im_end|>", "<think>", "[PAD263]"]
    expected = Qwen2TokenizerFast(
        vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges, extra_special_tokens=["<|im_end|>"]
    )
    expected.add_tokens([AddedToken("<think>", normalized=False)])
    if end is not None:
        template = {"single": "$A <|endoftext|>", "pair": "$A <|endoftext|> $B:1 <|endoftext|>:1"}
        expected.backend_tokenizer.post_processor = processors.TemplateProcessing(
            **template, special_tokens=[(end, len(symbols))]
        )
    types = [NORMAL] * len(symbols) + [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    ids = {"eos_token_id": len(symbols), "padding_token_id": len(symbols), "pre": "qwen2"} | flags
    found = write(tmp_path / "m.gguf", "gpt2", tokens, types, merges=[" ".join(pair) for pair in merges], **ids)
    assert_equal(found, expected)


def test_unigram_equals_that_of_transformers(tmp_path):
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, "▁the", "s", "é", "中", "<mask>"]
    scores = [0.0] * 4 + [-float(i) for i in range(len(pieces) - 5)] + [0.0]
    expected = XLMRobertaTokenizerFast(vocab=list(zip(pieces, scores, strict=True)))
    charsmap = np.frombuffer(empty_charsmap(), np.uint8)
    expected.backend_tokenizer.normalizer = normalizers.Precompiled(charsmap.tobytes())
    types = [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * (len(pieces) - 5) + [CONTROL]
    ids = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3, "padding_token_id": 1, "mask_token_id": 35}
    values = {"scores": np.array(scores, np.float32), "precompiled_charsmap": charsmap, "seperator_token_id": 2}
    assert_equal(write(tmp_path / "m.gguf", "t5", pieces, types, **values, **ids), expected)


def empty_charsmap():
    """Returns a table of SentencePiece without replacements: the size of its trie in bytes, and 256 empty units."""
    return (1024).to_bytes(4, "little") + bytes(1024)


@cases(__file__, "kind", "values", "message")
def test_tokenizer_that_cannot_be_built_is_described(kind, values, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        write(tmp_path / "m.gguf", kind, ["a", "b"], [NORMAL, NORMAL], **values)


def test_tokenizer_json_beside_gguf_takes_precedence(tmp_path, minilm_folder):
    values = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    values |= {"attention.head_count": 2, "attention.layer_norm_epsilon": 1e-12}
    metadata = {f"bert.{key}": value for key, value in values.items()}
    table = {"token_embd.weight": ("F16", np.zeros((30_522, 32), np.float32))}
    metadata |= {"tokenizer.ggml.model": "none", "general.architecture": "bert"}
    write_gguf(tmp_path / "m.gguf", metadata, table)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json of the original checkpoint beside"):
        load_tokenizer(info)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(Path(minilm_folder) / name)
    expected = load_tokenizer(resolve_model(EngineConfig(model=str(minilm_folder))))
    assert load_tokenizer(info).json == expected.json
