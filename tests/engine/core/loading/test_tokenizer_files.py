"""Tokenizers read from their files equal those of transformers, byte by byte."""

import base64
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from penstock.engine.core.loading import tokenizer_classes
from penstock.engine.core.loading.tokenizer_classes import CLASSES, NeedsTransformersError, class_name
from penstock.engine.core.loading.tokenizer_files import LoadedTokenizer, read_tokenizer
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import PairChat

from ....tables import cases, table

Json = dict[str, Any]
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 400, "num_hidden_layers": 1}
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
GPT = ["<|endoftext|>", "<|im_start|>", "<|padding|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
PIECES = [*"éÉﬁ中文\u0301\u200b😀▁\n\t", "[CLS]", "<s>", "<mask>", "<|endoftext|>"]


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


def unigram_of_deberta() -> Tokenizer:
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "▁", *LETTERS, "▁the", "▁cat", "s", "é", "中", "!", "[MASK]"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(max(i - 3, 0))) for i, piece in enumerate(pieces)], 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(BERT)
    return tokenizer


# A vocabulary, and the model types that use it with the class that their files declare.
FILES: dict[str, tuple[list[tuple[str, str | None]], Callable[[], Tokenizer]]] = {
    "word pieces": ([("bert", "BertTokenizer"), ("bert", None)], lambda: word_piece(BERT)),
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
            ("llama", "GPT2Tokenizer"),
        ],
        lambda: byte_pairs(GPT),
    ),
    "sentence pairs": (
        [("llama", "LlamaTokenizerFast"), ("mistral", "LlamaTokenizer")],
        lambda: sentence_pairs(["<unk>", "<s>", "</s>"]),
    ),
    "sentence pairs of gemma": ([("gemma3_text", "GemmaTokenizerFast")], lambda: sentence_pairs(GEMMA)),
    "unigram": ([("xlm-roberta", "XLMRobertaTokenizer"), ("bert", "XLMRobertaTokenizerFast")], unigram),
    "unigram of deberta": (
        [("deberta-v2", "DebertaV2Tokenizer"), ("deberta-v2", "DebertaV2TokenizerFast")],
        unigram_of_deberta,
    ),
}
READERS = [(name, *reader) for name, (readers, _) in FILES.items() for reader in readers]
BASE = {"model_max_length": 64, "clean_up_tokenization_spaces": True}
# Contents of tokenizer_config.json.
SETTINGS: list[Json] = table(__file__, "settings_of_tokenizer_config_json")


def odd_texts(count: int) -> list[str]:
    chance = random.Random(7)
    pool = [*LETTERS, *"ABC .,!?'-_09", *PIECES, "the ", " the", "cats", " "]
    return ["".join(chance.choices(pool, k=chance.randrange(24))) for _ in range(count)]


def write(folder: Path, model_type: str, settings: Json, **config: Any) -> None:
    """Writes the files beside tokenizer.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config |= SIZES | {"model_type": model_type, "architectures": [MODEL_MAPPING_NAMES[model_type]]}
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> LoadedTokenizer | None:
    """Returns the tokenizer read from the files; None if transformers must read it."""
    try:
        info = resolve_model(EngineConfig(model=str(folder)))
        return read_tokenizer(info, Path(info.path))
    except NeedsTransformersError:
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
def test_every_setting_is_read_as_by_transformers(
    name: str, model_type: str, declared: str | None, tmp_path: Path
) -> None:
    FILES[name][1]().save(str(tmp_path / "tokenizer.json"))
    num_read = 0
    for settings in SETTINGS:
        write(tmp_path, model_type, BASE | {"tokenizer_class": declared} | settings)
        if (found := read(tmp_path)) is not None:
            num_read += 1
            check_equal(found, tmp_path)
        if not settings:
            assert found is not None
            check_same_ids(found, tmp_path, num_texts=1000)
    assert num_read >= 10


def write_json(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def write_template(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{{ messages }}")


def added_tokens(folder: Path) -> list[Json]:
    tokens: list[Json] = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return tokens


def last_token(folder: Path) -> str:
    return str(added_tokens(folder)[-1]["content"])


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_last_token(folder: Path, **flags: Any) -> None:
    *others, last = added_tokens(folder)
    edit_tokenizer(folder, added_tokens=[*others, {**last, **flags}])


def token_table(folder: Path) -> Json:
    """Returns the added tokens of tokenizer.json in the form of tokenizer_config.json."""
    return {str(token.pop("id")): token for token in added_tokens(folder)}


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder, "tokenizer_config.json", config | changes)


def write_table(folder: Path, table: Json) -> None:
    edit_config(folder, added_tokens_decoder=table)


def write_templates(folder: Path) -> None:
    write_template(folder, "chat_template.jinja")
    write_template(folder, "additional_chat_templates/tool_use.jinja")


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
NEW_TOKEN = {"900": {"content": "<new>", **FLAGS}}
MAP = "special_tokens_map.json"
TRUNCATION = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4 * 3)).decode()}
# Changes of a model folder, and whether penstock reads the tokenizer without transformers.
FOLDERS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "table": (lambda f: write_table(f, token_table(f)), True),
    "longer table": (lambda f: write_table(f, token_table(f) | NEW_TOKEN), False),
    "empty table": (lambda f: write_table(f, {}), True),
    "map with flags": (
        lambda f: write_json(f, MAP, {"mask_token": {"content": last_token(f), "lstrip": True, "normalized": True}}),
        True,
    ),
    "map of further tokens": (
        lambda f: write_json(f, MAP, {"additional_special_tokens": [last_token(f)], "cls_token": last_token(f)}),
        True,
    ),
    "map with another key": (lambda f: write_json(f, MAP, {"image_token": last_token(f)}), False),
    "more old added tokens": (lambda f: write_json(f, "added_tokens.json", {"<new>": 900}), False),
    "templates": (write_templates, True),
    "no post-processor": (lambda f: edit_tokenizer(f, post_processor=None), True),
    "truncation on the left": (lambda f: edit_tokenizer(f, truncation=TRUNCATION), True),
    "added tokens in another order": (lambda f: edit_tokenizer(f, added_tokens=added_tokens(f)[::-1]), False),
    "added token that is not special": (lambda f: edit_last_token(f, special=False), True),
    "added token beyond the vocabulary": (
        lambda f: edit_tokenizer(f, added_tokens=[*added_tokens(f), {"content": "<new>", "id": 900, **FLAGS}]),
        False,
    ),
    "backend of another library": (lambda f: edit_config(f, backend="sentencepiece"), False),
    "no tokenizer_config.json": (lambda f: (f / "tokenizer_config.json").unlink(), True),
    "charsmap": (
        lambda f: edit_tokenizer(f, normalizer={"type": "Sequence", "normalizers": [CHARSMAP, {"type": "NFC"}]}),
        True,
    ),
}


@pytest.mark.parametrize("change", FOLDERS)
def test_every_folder_is_read_as_by_transformers(change: str, tmp_path: Path) -> None:
    write_change, is_read = FOLDERS[change]
    num_read = 0
    for i, (name, model_type, declared) in enumerate(READERS):
        folder = tmp_path / str(i)
        folder.mkdir()
        FILES[name][1]().save(str(folder / "tokenizer.json"))
        write(folder, model_type, BASE | {"tokenizer_class": declared})
        write_change(folder)
        if (found := read(folder)) is not None:
            num_read += 1
            check_equal(found, folder)
    assert (num_read > 0) is is_read


@pytest.mark.parametrize(("name", "model_type", "declared"), READERS)
def test_folder_saved_by_transformers_is_read_without_it(
    name: str, model_type: str, declared: str | None, tmp_path: Path
) -> None:
    FILES[name][1]().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, model_type, BASE | {"tokenizer_class": declared})
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    found = read(tmp_path)
    assert found is not None
    check_equal(found, tmp_path)


def clip_pairs() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(f"{s}</w>" for s in alphabet), "th", "the</w>"]
    table, merges = {symbol: i for i, symbol in enumerate(symbols)}, [("t", "h"), ("th", "e</w>")]
    model = models.BPE(table, merges, end_of_word_suffix="</w>", unk_token="<|endoftext|>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(symbols[:2])
    return tokenizer


@pytest.mark.parametrize(
    ("family", "processor", "build"),
    [("clip", "CLIP", clip_pairs), ("siglip2", "Siglip2", lambda: sentence_pairs(GEMMA))],
)
def test_tokenizer_of_texts_beside_images_equals_transformers(
    family: str, processor: str, build: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    build().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": f"{processor}ImageProcessor"})
    )
    for settings in SETTINGS:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(BASE | settings))
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": family, "text_config": SIZES | {"vocab_size": 900}, "vision_config": SIZES})
        )
        if (found := read(tmp_path)) is not None:
            check_equal(found, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(BASE))
    found = read(tmp_path)
    assert found is not None
    check_same_ids(found, tmp_path, 300)


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_class_is_the_one_of_transformers(is_byte_level: bool, tmp_path: Path) -> None:
    tokenizer = byte_pairs(GPT) if is_byte_level else word_piece(BERT)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded: list[str] = []

    def record(cls: type, *_: Any, **__: Any) -> None:
        loaded.append(cls.__name__)

    declarable = ("PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizerFast", *CLASSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(record))
        for model_type in tokenizer_classes._REGISTERED.keys() - {"new", "ministral3_bidirec"}:
            for declared in (None, *declarable):
                whole = model_type.removesuffix("_text_model")
                write(tmp_path, whole, {"tokenizer_class": declared})
                AutoTokenizer.from_pretrained(tmp_path, config=AutoConfig.for_model(whole))
                found = class_name(model_type, declared, is_byte_level=is_byte_level)
                assert found == loaded[-1], (model_type, declared)
    assert len(set(loaded)) > 8


def test_unsupported_tokenizer_is_left_to_transformers(tmp_path: Path) -> None:
    word_piece(BERT).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "bert", BASE)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    for changes, reason in (
        ({"pair_chat": PairChat()}, "prompt of pairs"),
        ({"model_type": "convbert"}, "'convbert'"),
        ({"path": str(tmp_path / "none")}, "no tokenizer.json"),
    ):
        changed = replace(info, **changes)
        with pytest.raises(NeedsTransformersError, match=reason):
            read_tokenizer(changed, Path(changed.path))


# Model type, vocabulary, tokenizer_config.json, values in `model` of tokenizer.json, and the reason.
OTHERS = table(__file__, "files_of_other_forms_are_left_to_transformers")


@pytest.mark.parametrize(("model_type", "vocabulary", "settings", "model", "reason"), OTHERS)
def test_files_of_other_forms_are_left_to_transformers(
    model_type: str, vocabulary: str, settings: Json, model: Json, reason: str, tmp_path: Path
) -> None:
    content = json.loads(FILES[vocabulary][1]().to_str())
    if "vocab" in model:
        content["model"]["vocab"][model["vocab"]][1] = -1.0
    else:
        content["model"] |= model
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    write(tmp_path, model_type, BASE | settings)
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(NeedsTransformersError, match=reason):
        read_tokenizer(info, tmp_path)


@cases(__file__, "name", "content", "reason")
def test_unusual_files_beside_the_tokenizer_are_left_to_transformers(
    name: str, content: Json, reason: str, tmp_path
) -> None:
    word_piece(BERT).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "bert", BASE | {"additional_special_tokens": []})
    (tmp_path / name).write_text(json.dumps(content))
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(NeedsTransformersError, match=reason):
        read_tokenizer(info, tmp_path)


def test_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    write(tmp_path, "bert", BASE)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:53aa\nsize 9\n")
    info = resolve_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is a Git LFS pointer.*git lfs pull"):
        read_tokenizer(info, tmp_path)


@pytest.mark.parametrize("name", ["minilm", "toxicity", "minimind2"])
def test_published_tokenizer_equals_that_of_transformers(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    found = read(folder)
    assert found is not None
    check_equal(found, folder)
    check_same_ids(found, folder, num_texts=3000)
