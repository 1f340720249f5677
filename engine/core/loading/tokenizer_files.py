"""Reads a tokenizer from its files as transformers does, but without importing transformers (1 s, 31 MB).

Raises NeedsTransformersError for files that these rules do not cover; transformers then reads them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from ...model_files.model_folder import LFS_HINT, is_lfs_pointer, one_line, read_object
from ...protocol.errors import ModelLoadError, UnsupportedModelError
from ...protocol.model_info import ModelInfo
from .tokenizer_classes import CLASSES, PLAIN, NeedsTransformersError, bare_texts, class_name

Render = Callable[..., str]


@dataclass(slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer of the `tokenizers` library without truncation and padding, with its settings in transformers.

    Attributes:
        backend: The tokenizer.
        class_name: Its class in transformers.
        settings: Settings, as in tokenizer_config.json.
        special_tokens_map: Named special tokens, such as cls_token.
        extra_special_tokens: Special tokens without a name.
        chat_template: Chat template in Jinja, or several by name; None if there is none.
        padding_side: "left" or "right".
        truncation_side: "left" or "right".
        model_input_names: Inputs of the model, such as token_type_ids.
        render: transformers' function that renders messages with the chat template; None without transformers.
    """

    backend: Tokenizer
    class_name: str
    settings: Mapping[str, Any]
    special_tokens_map: Mapping[str, str]
    extra_special_tokens: Sequence[str] = ()
    chat_template: str | Mapping[str, str] | None = None
    padding_side: str = "right"
    truncation_side: str = "right"
    model_input_names: Sequence[str] = ("input_ids", "attention_mask")
    render: Render | None = None

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def of_transformers(cls, tokenizer: Any) -> LoadedTokenizer:
        """Converts a fast tokenizer of transformers."""
        return cls(
            backend=tokenizer.backend_tokenizer,
            class_name=type(tokenizer).__name__,
            settings=tokenizer.init_kwargs,
            special_tokens_map=tokenizer.special_tokens_map,
            extra_special_tokens=tokenizer.extra_special_tokens,
            chat_template=tokenizer.chat_template,
            padding_side=tokenizer.padding_side,
            truncation_side=tokenizer.truncation_side,
            model_input_names=tokenizer.model_input_names,
            render=tokenizer.apply_chat_template,
        )

    def special_id(self, name: str) -> int | None:
        """Returns the id of a named special token, such as cls_token; None if there is none."""
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def all_special_ids(self) -> set[int]:
        """The ids of all special tokens."""
        tokens = {*self.special_tokens_map.values(), *self.extra_special_tokens}
        return {token_id for token_id in map(self.backend.token_to_id, tokens) if token_id is not None}


_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA: Final = ("additional_special_tokens", "extra_special_tokens")
_FLAGGED: Final = "AddedToken"
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("add_bos_token", "add_eos_token", "add_prefix_space", "backend", "clean_up_tokenization_spaces"),
        *("do_basic_tokenize", "do_lower_case", "errors", "is_local", "legacy", "local_files_only", "max_length"),
        *("model_max_length", "name_or_path", "never_split"),
        *("pad_to_multiple_of", "pad_token_type_id", "processor_class", "sp_model_kwargs", "special_tokens_map_file"),
        *("spaces_between_special_tokens", "split_by_punct", "stride", "strip_accents", "tokenize_chinese_chars"),
        *("tokenizer_class", "tokenizer_file", "trim_offsets", "truncation_strategy", "unk_id"),
        *("use_default_system_prompt", "vocab_type"),
    )
)
"""Keys of tokenizer_config.json without effect on token ids, unless they are options of a TokenizerClass."""
_READ: Final = frozenset(
    (*_NAMED, *_EXTRA, "added_tokens_decoder", "chat_template", "model_input_names", "padding_side", "truncation_side")
)


class _AddedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Model(msgspec.Struct):
    """Fields of `model` in tokenizer.json that the `tokenizers` library does not expose."""

    unk_id: int | None = None
    byte_fallback: bool = False


class _File(msgspec.Struct):
    added_tokens: list[_AddedToken]
    model: _Model
    normalizer: dict[str, Any] | None = None


def read_tokenizer(info: ModelInfo, folder: Path) -> LoadedTokenizer:
    """Reads the tokenizer of a model from the tokenizer.json of a folder and the files beside it.

    Raises:
        NeedsTransformersError: transformers must read the tokenizer. The message states the reason.
        ModelLoadError: tokenizer.json is a Git LFS pointer.
    """
    if info.pair_chat is not None:
        raise NeedsTransformersError("its chat template makes the prompt of pairs")
    if info.model_type in ("mistral", "ministral3") and find_spec("mistral_common") is not None:
        raise NeedsTransformersError("mistral_common is installed, and transformers would use it")
    data, backend, file = _read_file(folder)
    settings = _settings(folder)
    declared = settings.get("tokenizer_class") or info.config.get("tokenizer_class")
    name = class_name(info.model_type, declared, is_byte_level=b'"ByteLevel"' in data)
    if (known := CLASSES.get(name)) is None:
        raise NeedsTransformersError(f"its class is {name}")
    truncation = backend.truncation or {}
    padding = backend.padding or {}
    tokens: dict[str, str | None] = {"pad_token": padding["pad_token"]} if padding else {}
    tokens.update(known.tokens)
    tokens.update({key: _text(settings[key]) for key in _NAMED if key in settings})
    extra = _extra(settings)
    _check_added(file, backend, folder, settings, is_built=known.build is not None)
    _check_special([*tokens.values(), *extra], file)
    options = {key: _option(key, settings.get(key, default), default) for key, default in known.options.items()}
    if known.build is not None:
        if any(tokens[key] is None for key, default in known.tokens.items() if default is not None):
            raise NeedsTransformersError("a special token is null")
        known.build(
            backend,
            {
                **options,
                **{key: tokens[key] for key in _NAMED if key in tokens},
                "extra_special_tokens": extra,
                "unk_id": file.model.unk_id,
                "byte_fallback": file.model.byte_fallback,
                "charsmap": _charsmap(file.normalizer),
            },
        )
    if backend.post_processor is None:
        backend.post_processor = bare_texts()
    return LoadedTokenizer(
        backend=backend,
        class_name=name,
        settings={**settings, **options, **tokens, "added_tokens_decoder": backend.get_added_tokens_decoder()},
        special_tokens_map={key: token for key in _NAMED if (token := tokens.get(key)) is not None},
        extra_special_tokens=extra,
        chat_template=_chat_template(folder, settings.get("chat_template")),
        padding_side=_side(settings, "padding_side", padding.get("direction", known.padding_side)),
        truncation_side=_side(settings, "truncation_side", truncation.get("direction", "right")),
        model_input_names=settings.get("model_input_names", known.input_names),
    )


def _read_file(folder: Path) -> tuple[bytes, Tokenizer, _File]:
    """Returns the bytes of tokenizer.json, the tokenizer of the library and the fields that the library hides."""
    try:
        data = (folder / "tokenizer.json").read_bytes()
        backend = Tokenizer.from_buffer(data)
        return data, backend, msgspec.json.decode(data, type=_File)
    except FileNotFoundError:
        raise NeedsTransformersError("there is no tokenizer.json") from None
    except Exception as error:  # the tokenizers library raises Exception for an unreadable file
        if is_lfs_pointer(folder / "tokenizer.json"):  # transformers could not read it either
            raise ModelLoadError(f"{folder / 'tokenizer.json'} {LFS_HINT}.") from None
        raise NeedsTransformersError("its tokenizer.json cannot be read") from error


def read_static_tokenizer(info: ModelInfo) -> LoadedTokenizer:
    """Reads the tokenizer of a static embedding: tokenizer.json unchanged, but without special tokens around a text.

    Raises:
        UnsupportedModelError: The file is missing or damaged.
    """
    path = Path(info.path) / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises Exception
        raise UnsupportedModelError(f"{path} cannot be read: {one_line(error)}; download the model again.") from error
    backend.post_processor = bare_texts()
    return LoadedTokenizer(backend=backend, class_name=PLAIN, settings={}, special_tokens_map={})


def unknown_id(backend: Tokenizer) -> int | None:
    """Returns the id of unknown words; None if the tokenizer has no such token."""
    if isinstance(backend.model, Unigram):
        return msgspec.json.decode(backend.to_str(), type=_File).model.unk_id
    token = getattr(backend.model, "unk_token", None)
    return None if token is None else backend.token_to_id(token)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, updated with special_tokens_map.json if transformers reads that file."""
    settings = read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        older = read_object(folder / "special_tokens_map.json")
        if not older.keys() <= {*_NAMED, *_EXTRA} or any(
            key in settings and settings[key] != older[key] for key in _EXTRA if key in older
        ):
            raise NeedsTransformersError("its special_tokens_map.json has other settings than special tokens")
        settings |= {key: {"__type": _FLAGGED, **v} if isinstance(v, dict) else v for key, v in older.items()}
    if settings.get("backend", "tokenizers") != "tokenizers":  # transformers 5 writes the library that it used
        raise NeedsTransformersError(f"its tokenizer_config.json has the backend {settings['backend']!r}")
    if unknown := settings.keys() - _READ - _WITHOUT_EFFECT:
        raise NeedsTransformersError(f"its tokenizer_config.json has {min(unknown)}")
    return settings


def _text(token: Any) -> str | None:
    """Returns a special token. The files contain a text, null, or a text with flags."""
    if token is None or isinstance(token, str):
        return token
    if isinstance(token, dict) and token.get("__type") == _FLAGGED and isinstance(token.get("content"), str):
        return str(token["content"])
    raise NeedsTransformersError("a special token is no text")


def _extra(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the special tokens without a name."""
    given = [settings[key] for key in _EXTRA if settings.get(key)]
    tokens = given[0] if given else []
    if len(given) > 1 or not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise NeedsTransformersError("its further special tokens are no list of texts")
    return tuple(tokens)


def _option(key: str, value: Any, default: bool | None) -> bool | None:
    if isinstance(value, bool) or (value is None and default is None):
        return value
    raise NeedsTransformersError(f"{key} is {value!r}")


def _side(settings: Mapping[str, Any], key: str, default: str) -> str:
    side = settings.get(key, default)
    if side not in ("left", "right"):
        raise NeedsTransformersError(f"{key} is {side!r}")
    return str(side)


def _check_added(file: _File, backend: Tokenizer, folder: Path, settings: Mapping[str, Any], *, is_built: bool) -> None:
    """Raises NeedsTransformersError if transformers would use other added tokens than tokenizer.json has.

    transformers also adds tokens of tokenizer_config.json, or of the older added_tokens.json. A class with `build`
    takes them from tokenizer_config.json alone, ordered by id.
    """
    ids = [token.id for token in file.added_tokens]
    in_place = all(backend.token_to_id(token.content) == token.id for token in file.added_tokens)
    if not in_place or ids != sorted(set(ids)):
        raise NeedsTransformersError("its added tokens are not in the order of their ids")
    if "added_tokens_decoder" not in settings:
        if not set(read_object(folder / "added_tokens.json").values()) <= set(ids):
            raise NeedsTransformersError("its added_tokens.json has tokens that its tokenizer.json lacks")
        return
    try:
        table = [{"id": int(token_id), **token} for token_id, token in settings["added_tokens_decoder"].items()]
        tokens = set(msgspec.convert(table, list[_AddedToken]))
    except (TypeError, ValueError, AttributeError, msgspec.ValidationError):
        raise NeedsTransformersError("its added_tokens_decoder is not read here") from None
    if not tokens <= set(file.added_tokens) or (is_built and len(tokens) < len(ids)):
        raise NeedsTransformersError("its tokenizer_config.json has other added tokens than its tokenizer.json")


def _check_special(tokens: Iterable[str | None], file: _File) -> None:
    """Raises NeedsTransformersError if transformers would mark a token as special that is not special in the file."""
    special = {token.content for token in file.added_tokens if token.special}
    if missing := {token for token in tokens if token is not None} - special:
        raise NeedsTransformersError(f"its tokenizer.json does not have the special token {min(missing)}")


def _charsmap(normalizer: Mapping[str, Any] | None) -> bytes | None:
    """Returns the normalisation table of SentencePiece; None if there is none."""
    if normalizer is None:
        return None
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    return next((base64.b64decode(s["precompiled_charsmap"]) for s in steps if s.get("type") == "Precompiled"), None)


def _chat_template(folder: Path, given: Any) -> str | dict[str, str] | None:
    """Returns the chat template, or several by name: from template files, else from tokenizer_config.json."""
    try:
        files = {path.stem: path.read_text("utf-8") for path in (folder / "additional_chat_templates").glob("*.jinja")}
        if (default := folder / "chat_template.jinja").is_file():
            files = {"default": default.read_text("utf-8")} | files
        if given is None:  # of older processors
            given = read_object(folder / "chat_template.json").get("chat_template")
        if isinstance(given, list):
            given = {entry["name"]: entry["template"] for entry in given}
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise NeedsTransformersError("its chat templates are not read here") from error
    if files:
        return files["default"] if files.keys() == {"default"} else files
    if given is not None and not isinstance(given, str | dict):
        raise NeedsTransformersError("its chat template is no text")
    return given
