"""A tokenizer that is read from its files is, byte by byte, the one that transformers makes of them."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from penstock.engine.core.loading.tokenizer_classes import CLASSES, NotBuiltHereError, class_name
from penstock.engine.core.loading.tokenizer_files import LoadedTokenizer, read_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.model_info import PairChat

Json = dict[str, Any]
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 400, "num_hidden_layers": 1}
ARCHITECTURES = {
    "bert": "BertModel",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "camembert": "CamembertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "mpnet": "MPNetModel",
    "modernbert": "ModernBertModel",
    "llama": "LlamaModel",
    "mistral": "MistralModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "gemma3_text": "Gemma3TextModel",
    "phi3": "Phi3Model",
    "mamba": "MambaModel",
    "falcon_mamba": "FalconMambaModel",
    "mamba2": "Mamba2Model",
    "jamba": "JambaModel",
    "bamba": "BambaModel",
    "granitemoehybrid": "GraniteMoeHybridModel",
}
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
GPT = ["<|endoftext|>", "<|im_start|>", "<|padding|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
PIECES = [
    "é",
    "É",
    "ﬁ",
    "中",
    "文",
    "\u0301",
    "\u200b",
    "😀",
    "[CLS]",
    "<s>",
    "<mask>",
    "▁",
    "<|endoftext|>",
    "\n",
    "\t",
]


def word_piece(special: list[str]) -> Tokenizer:
    words = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "cat", "##s", "É", "é", "中", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token=special[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128, pad_token=special[0])
    return tokenizer


def byte_pairs(special: list[str]) -> Tokenizer:
    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(special)
    return tokenizer


def sentence_pairs(special: list[str]) -> Tokenizer:
    symbols = [*special, *(f"<0x{i:02X}>" for i in range(256)), "▁", *LETTERS, "▁a", "at"]
    table, merges = {symbol: i for i, symbol in enumerate(symbols)}, [("▁", "a"), ("a", "t")]
    tokenizer = Tokenizer(models.BPE(table, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(special)
    first = special[1]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 1)])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [*ROBERTA[:4], "▁", *LETTERS, "▁the", "▁cat", "s", "é", "中", ROBERTA[4]]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(ROBERTA[:4])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer


# A vocabulary, and what reads it: model types with the class that their files declare.
FILES: dict[str, tuple[list[tuple[str, str | None]], Callable[[], Tokenizer]]] = {
    "word pieces": (
        [("bert", "BertTokenizer"), ("bert", None), ("distilbert", "BertTokenizerFast")],
        lambda: word_piece(BERT),
    ),
    "word pieces of mpnet": (
        [("mpnet", "MPNetTokenizer"), ("mpnet", "PreTrainedTokenizerFast")],
        lambda: word_piece(["<pad>", "[UNK]", "<s>", "</s>", "<mask>"]),
    ),
    "byte pairs of roberta": (
        [("roberta", "RobertaTokenizer"), ("modernbert", "PreTrainedTokenizerFast")],
        lambda: byte_pairs(ROBERTA),
    ),
    "byte pairs of gpt": (
        [
            *(("qwen3", "Qwen2Tokenizer"), ("qwen2", "PreTrainedTokenizerFast"), ("mamba", "GPTNeoXTokenizer")),
            *(("llama", "LlamaTokenizer"), ("llama", "GPT2Tokenizer")),
        ],
        lambda: byte_pairs(GPT),
    ),
    "sentence pairs": (
        [("llama", "LlamaTokenizerFast"), ("mistral", "LlamaTokenizer"), ("llama", "PreTrainedTokenizerFast")],
        lambda: sentence_pairs(["<unk>", "<s>", "</s>"]),
    ),
    "sentence pairs of gemma": ([("gemma3_text", "GemmaTokenizerFast")], lambda: sentence_pairs(GEMMA)),
    "unigram": ([("xlm-roberta", "XLMRobertaTokenizer"), ("bert", "XLMRobertaTokenizerFast")], unigram),
}
READERS = [(name, *reader) for name, (readers, _) in FILES.items() for reader in readers]
BASE = {"model_max_length": 64, "clean_up_tokenization_spaces": True}
# What tokenizer_config.json may say; a key that transformers and the files here disagree on is a failure.
SETTINGS: list[Json] = [
    {},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    {"do_lower_case": None},
    {"add_prefix_space": True, "trim_offsets": False},
    {"add_prefix_space": None, "legacy": True},
    {"add_prefix_space": False, "legacy": False},
    {"add_prefix_space": "yes"},
    {"add_bos_token": True, "add_eos_token": True},
    {"padding_side": "left", "truncation_side": "left"},
    {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
    {"cls_token": None},
    {"pad_token": None},
    {"unk_token": "<|endoftext|>", "pad_token": "<|padding|>"},
    {"mask_token": "[NEW]"},
    {"image_token": "<s>"},
    {"cls_token": {"__type": "AddedToken", "content": "[SEP]", "lstrip": True}},
    {"additional_special_tokens": ["<|im_start|>"]},
    {"extra_special_tokens": ["[MASK]", "<mask>"]},
    {"extra_special_tokens": {}, "additional_special_tokens": []},
    {"extra_special_tokens": {"fim_token": "<mask>"}},
    {"chat_template": "{{ bos_token }}{{ messages[0].content }}"},
    {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
    {"split_special_tokens": True},
    {"unknown_key": 1},
]


def odd_texts(count: int) -> list[str]:
    chance = random.Random(7)
    pool = [*LETTERS, *"ABC .,!?'-_09", *PIECES, "the ", " the", "cats", " "]
    return ["".join(chance.choices(pool, k=chance.randrange(24))) for _ in range(count)]


def write(folder: Path, model_type: str, settings: Json, **config: Any) -> None:
    """Writes what stands beside tokenizer.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config |= SIZES | {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> LoadedTokenizer | None:
    """Returns the tokenizer as it is read from the files; None where it is left to transformers."""
    try:
        return read_tokenizer(resolve_model(EngineConfig(model=str(folder))))
    except NotBuiltHereError:
        return None


def check_equal(found: LoadedTokenizer, folder: Path) -> None:
    expected = LoadedTokenizer.of_transformers(AutoTokenizer.from_pretrained(folder))
    assert json.loads(found.backend.to_str()) == json.loads(expected.backend.to_str())
    assert found.special_tokens_map == expected.special_tokens_map
    assert set(found.extra_special_tokens) == set(expected.extra_special_tokens)
    assert found.all_special_ids == expected.all_special_ids
    assert (found.padding_side, found.truncation_side) == (expected.padding_side, expected.truncation_side)
    assert found.chat_template == expected.chat_template
    assert list(found.model_input_names) == list(expected.model_input_names)


def check_same_ids(found: LoadedTokenizer, folder: Path, num_texts: int) -> None:
    reference: Any = AutoTokenizer.from_pretrained(folder)
    texts = odd_texts(num_texts)
    pairs = list(zip(texts[: num_texts // 3], texts[num_texts // 3 :], strict=False))
    for inputs in (texts, pairs):
        encoded = reference(inputs, return_token_type_ids=True)
        ours = found.backend.encode_batch(inputs)
        assert [e.ids for e in ours] == encoded["input_ids"]
        assert [e.type_ids for e in ours] == encoded["token_type_ids"]


@pytest.mark.parametrize(("name", "model_type", "declared"), READERS)
def test_every_setting_is_read_as_transformers_reads_it(
    name: str, model_type: str, declared: str | None, tmp_path: Path
) -> None:
    FILES[name][1]().save(str(tmp_path / "tokenizer.json"))
    num_read = 0
    for settings in SETTINGS:
        write(tmp_path, model_type, BASE | {"tokenizer_class": declared} | settings)
        if (found := read(tmp_path)) is not None:
            num_read += 1
            check_equal(found, tmp_path)
    assert num_read >= 10


@pytest.mark.parametrize(("name", "model_type", "declared"), READERS)
def test_what_is_common_needs_no_transformers(name: str, model_type: str, declared: str | None, tmp_path: Path) -> None:
    FILES[name][1]().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, model_type, BASE | {"tokenizer_class": declared})
    found = read(tmp_path)
    assert found is not None
    check_same_ids(found, tmp_path, num_texts=1000)


def beside(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def table(folder: Path) -> Json:
    """Returns the added tokens of tokenizer.json as tokenizer_config.json writes them."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {str(token.pop("id")): token for token in tokens}


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one_more(folder: Path, **flags: bool) -> Json:
    """Returns the table with one token that tokenizer.json lacks."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return table(folder) | {"900": {"content": "<new>", **plain, **flags}}


def lists_of(folder: Path) -> list[Json]:
    path = folder / "tokenizer.json"
    tokens: list[Json] = json.loads(path.read_text())["added_tokens"]
    return tokens


# What a folder may hold beside or in tokenizer.json.
FOLDERS: dict[str, Callable[[Path], None]] = {
    "table": lambda f: beside(f, "tokenizer_config.json", config_of(f) | {"added_tokens_decoder": table(f)}),
    "longer table": lambda f: beside(f, "tokenizer_config.json", config_of(f) | {"added_tokens_decoder": one_more(f)}),
    "shorter table": lambda f: beside(
        f, "tokenizer_config.json", config_of(f) | {"added_tokens_decoder": dict(list(table(f).items())[:-1])}
    ),
    "broken table": lambda f: beside(f, "tokenizer_config.json", config_of(f) | {"added_tokens_decoder": {}}),
    "map": lambda f: beside(f, "special_tokens_map.json", {"mask_token": last(f), "unk_token": last(f)}),
    "map with flags": lambda f: beside(
        f, "special_tokens_map.json", {"mask_token": {"content": last(f), "lstrip": True, "normalized": True}}
    ),
    "map of further tokens": lambda f: beside(
        f, "special_tokens_map.json", {"additional_special_tokens": [last(f)], "cls_token": last(f)}
    ),
    "map with another key": lambda f: beside(f, "special_tokens_map.json", {"image_token": last(f)}),
    "map that is not read": lambda f: (
        beside(f, "tokenizer_config.json", config_of(f) | {"added_tokens_decoder": table(f)}),
        beside(f, "special_tokens_map.json", {"unk_token": last(f)}),
    )[0],
    "older added tokens": lambda f: beside(f, "added_tokens.json", {t["content"]: int(i) for i, t in table(f).items()}),
    "more older added tokens": lambda f: beside(f, "added_tokens.json", {"<new>": 900}),
    "template": lambda f: beside(f, "chat_template.jinja", "{{ messages }}"),
    "templates": lambda f: (
        beside(f, "chat_template.jinja", "{{ messages }}"),
        beside(f, "additional_chat_templates/tool_use.jinja", "{{ tools }}"),
    )[0],
    "named template alone": lambda f: beside(f, "additional_chat_templates/rag.jinja", "{{ documents }}"),
    "nothing around texts": lambda f: edited(f, post_processor=None),
    "cuts on the left": lambda f: edited(
        f, truncation={"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    ),
    "pads on the left": lambda f: edited(
        f,
        padding={
            "strategy": "BatchLongest",
            "direction": "Left",
            "pad_to_multiple_of": 8,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": last(f),
        },
    ),
    "added tokens in another order": lambda f: edited(f, added_tokens=lists_of(f)[::-1]),
    "added token with flags": lambda f: edited(
        f, added_tokens=[*lists_of(f)[:-1], {**lists_of(f)[-1], "lstrip": True, "normalized": True}]
    ),
    "added token that is not special": lambda f: edited(
        f, added_tokens=[*lists_of(f)[:-1], {**lists_of(f)[-1], "special": False}]
    ),
    "added token beyond the vocabulary": lambda f: edited(
        f, added_tokens=[*lists_of(f), {**lists_of(f)[-1], "content": "<new>", "id": 900}]
    ),
    "no tokenizer_config.json": lambda f: (f / "tokenizer_config.json").unlink(),
    "strips accents": lambda f: edited(f, normalizer={"type": "StripAccents"}),
    "charsmap": lambda f: edited(f, normalizer={"type": "Sequence", "normalizers": [CHARSMAP, {"type": "NFC"}]}),
}
LEFT_TO_TRANSFORMERS = {
    "longer table",
    "map with another key",
    "more older added tokens",
    "added tokens in another order",
    "added token beyond the vocabulary",
}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4 * 3)).decode()}


def config_of(folder: Path) -> Json:
    config: Json = json.loads((folder / "tokenizer_config.json").read_text())
    return config


def last(folder: Path) -> str:
    return str(lists_of(folder)[-1]["content"])


@pytest.mark.parametrize("style", FOLDERS)
def test_every_folder_is_read_as_transformers_reads_it(style: str, tmp_path: Path) -> None:
    num_read = 0
    for i, (name, model_type, declared) in enumerate(READERS):
        folder = tmp_path / str(i)
        folder.mkdir()
        FILES[name][1]().save(str(folder / "tokenizer.json"))
        write(folder, model_type, BASE | {"tokenizer_class": declared})
        FOLDERS[style](folder)
        if (found := read(folder)) is not None:
            num_read += 1
            check_equal(found, folder)
    assert (num_read == 0) == (style in LEFT_TO_TRANSFORMERS)


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_the_class_is_the_one_that_transformers_takes(is_byte_level: bool, tmp_path: Path) -> None:
    tokenizer = byte_pairs(GPT) if is_byte_level else word_piece(BERT)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    taken: list[str] = []

    def take(cls: type, *_: Any, **__: Any) -> None:
        taken.append(cls.__name__)

    declarable = ("PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizerFast", *CLASSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(take))
        for model_type in ARCHITECTURES:
            for declared in (None, *declarable):
                write(tmp_path, model_type, {"tokenizer_class": declared})
                AutoTokenizer.from_pretrained(tmp_path, config=AutoConfig.for_model(model_type))
                found = class_name(model_type, declared, is_byte_level=is_byte_level)
                assert found == taken[-1], (model_type, declared)
    assert len(set(taken)) > 8


def test_what_transformers_must_read_is_left_to_it(tmp_path: Path) -> None:
    word_piece(BERT).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "bert", BASE)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    for other, why in (
        (replace(info, pair_chat=PairChat()), "prompt of pairs"),
        (replace(info, model_type="nomic_bert"), "'nomic_bert'"),
        (replace(info, path=str(tmp_path / "none")), "no tokenizer.json"),
    ):
        with pytest.raises(NotBuiltHereError, match=why):
            read_tokenizer(other)


@pytest.mark.parametrize("name", ["minilm", "gte-small", "toxicity", "ner", "minimind2"])
def test_published_tokenizers_are_read_alike(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    found = read(folder)
    assert found is not None
    check_equal(found, folder)
    check_same_ids(found, folder, num_texts=3000)


@pytest.mark.parametrize(
    ("name", "model_type", "declared"),
    [
        ("qwen3-tokenizer", "qwen3", "Qwen2Tokenizer"),
        pytest.param("qwen3-tokenizer", "llama", "PreTrainedTokenizerFast", marks=pytest.mark.slow),
        ("gpt2-tokenizer", "llama", "GPT2Tokenizer"),
        ("gpt2-tokenizer", "mamba", "GPTNeoXTokenizer"),
    ],
)
def test_large_vocabularies_are_read_alike(
    name: str, model_type: str, declared: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(model_folder(name) / "tokenizer.json", tmp_path)
    write(tmp_path, model_type, BASE | {"tokenizer_class": declared, "pad_token": "<|endoftext|>"})
    found = read(tmp_path)
    assert found is not None
    check_equal(found, tmp_path)
    check_same_ids(found, tmp_path, num_texts=3000)
