"""Builds a tokenizer from the metadata of a GGUF file, with the tokenizer classes of transformers.

Source: the vocabularies that the converter of llama.cpp writes. "bert" is WordPiece: a word begins with "▁", and a
subword has no "##". "gpt2" is byte-level BPE, and "t5" is Unigram. Special tokens are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.models import BPE, Unigram, WordPiece

from ...model_files.gguf import read_gguf
from ...protocol.errors import UnsupportedModelError
from .tokenizer_classes import CLASSES, NeedsTransformersError
from .tokenizer_files import LoadedTokenizer

Metadata = Mapping[str, Any]

_PREFIX: Final = "tokenizer.ggml."
_WORD: Final = "▁"
# Types of tokens: unknown and control tokens are special.
_SPECIAL: Final = (2, 3)
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_IDS: Final = {
    "bos_token": ("bos_token_id",),
    "eos_token": ("eos_token_id",),
    "unk_token": ("unknown_token_id",),
    "sep_token": ("seperator_token_id", "eos_token_id"),
    "pad_token": ("padding_token_id",),
    "cls_token": ("cls_token_id", "bos_token_id"),
    "mask_token": ("mask_token_id",),
}
"""Keys of each named token; the first one in the file counts. "seperator" is the spelling of GGUF."""
_QWEN2_WORDS: Final = ("qwen2",)
"""Values of tokenizer.ggml.pre with the words of Qwen2."""


def build_gguf_tokenizer(path: Path) -> LoadedTokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: The file has no tokenizer of a supported type, or it is damaged.
        WeightError: The file cannot be read.
    """
    metadata = read_gguf(path).metadata
    kind = metadata.get(f"{_PREFIX}model")
    try:
        if kind == "bert":
            return _finished("BertTokenizer", _word_piece(metadata), metadata, _word_piece_options(metadata))
        if kind == "t5":
            return _finished("XLMRobertaTokenizer", _unigram(metadata), metadata, _unigram_options(metadata))
        if kind == "gpt2" and metadata.get(f"{_PREFIX}pre") in _QWEN2_WORDS:
            tokenizer = _finished("Qwen2Tokenizer", _bpe(metadata), metadata, {"extra_special_tokens": ()})
            _add_ends(tokenizer, metadata)
            return tokenizer
    except Exception as error:  # the tokenizers library raises Exception
        raise UnsupportedModelError(
            f"The tokenizer of {path} cannot be built from its metadata ({type(error).__name__}: {error}). Put the "
            "tokenizer.json of the original checkpoint beside the file."
        ) from error
    raise UnsupportedModelError(
        f"The tokenizer of {path} is {kind!r} with the words of {metadata.get(f'{_PREFIX}pre')!r}; penstock builds "
        "'bert', 't5', and 'gpt2' with the words of 'qwen2'. Put the tokenizer.json of the original checkpoint beside "
        "the file."
    )


def _finished(name: str, backend: Tokenizer, metadata: Metadata, options: Metadata) -> LoadedTokenizer:
    """Adds the special tokens, and the steps of a class of transformers."""
    known = CLASSES[name]
    tokens = metadata[f"{_PREFIX}tokens"]
    types = metadata[f"{_PREFIX}token_type"]
    assert known.build is not None
    added = [
        AddedToken(token, special=type_ in _SPECIAL, normalized=False, lstrip=token == "<mask>")
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (*_SPECIAL, _USER_DEFINED)
    ]
    named = dict(known.tokens)
    for token_name, keys in _IDS.items():
        token_id = next((metadata[_PREFIX + key] for key in keys if _PREFIX + key in metadata), None)
        if token_name in known.tokens and token_id is not None:
            named[token_name] = tokens[token_id]
    backend.add_tokens(added)
    known.build(backend, {**known.options, **named, **options})
    if wrong := [token.content for token in added if tokens[backend.token_to_id(token.content)] != token.content]:
        raise NeedsTransformersError(f"the token {wrong[0]!r} has another id")
    settings = {key: value for key, value in {**named, **options}.items() if isinstance(value, str | bool)}
    template = metadata.get("tokenizer.chat_template")
    return LoadedTokenizer(
        backend=backend,
        class_name=name,
        settings=settings,
        special_tokens_map={key: token for key, token in named.items() if token is not None},
        chat_template=template if isinstance(template, str) else None,
        padding_side=known.padding_side,
        model_input_names=known.input_names,
    )


def _word_piece(metadata: Metadata) -> Tokenizer:
    vocabulary: dict[str, int] = {}
    types = metadata[f"{_PREFIX}token_type"]
    for token_id, (token, type_) in enumerate(zip(metadata[f"{_PREFIX}tokens"], types, strict=True)):
        word = token.removeprefix(_WORD) if token.startswith(_WORD) or type_ in _SPECIAL else f"##{token}"
        vocabulary[f"##{token}" if word in vocabulary else word] = token_id  # words come before subwords
    return Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))


def _word_piece_options(metadata: Metadata) -> dict[str, Any]:
    """Returns the options of the normalizer. Older files have none: words in capitals mean that case matters."""
    lowercase = metadata.get(f"{_PREFIX}normalizer.lowercase")
    if lowercase is None:
        pairs = zip(metadata[f"{_PREFIX}tokens"], metadata[f"{_PREFIX}token_type"], strict=True)
        lowercase = not any(type_ not in _SPECIAL and token != token.lower() for token, type_ in pairs)
    return {"do_lower_case": lowercase, "strip_accents": metadata.get(f"{_PREFIX}normalizer.strip_accents")}


def _unigram(metadata: Metadata) -> Tokenizer:
    tokens = metadata[f"{_PREFIX}tokens"]
    scores = metadata[f"{_PREFIX}scores"]
    return Tokenizer(Unigram(list(zip(tokens, scores, strict=True)), metadata[f"{_PREFIX}unknown_token_id"], False))


def _unigram_options(metadata: Metadata) -> dict[str, Any]:
    charsmap = metadata.get(f"{_PREFIX}precompiled_charsmap")
    return {
        "add_prefix_space": metadata.get(f"{_PREFIX}add_space_prefix", True),
        "charsmap": None if charsmap is None else bytes(charsmap),
        "unk_id": metadata[f"{_PREFIX}unknown_token_id"],
        "byte_fallback": False,
    }


def _bpe(metadata: Metadata) -> Tokenizer:
    pairs = zip(metadata[f"{_PREFIX}tokens"], metadata[f"{_PREFIX}token_type"], strict=True)
    vocabulary = {token: token_id for token_id, (token, type_) in enumerate(pairs) if type_ != _UNUSED}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata[f"{_PREFIX}merges"])]
    return Tokenizer(BPE(vocabulary, merges))


def _add_ends(tokenizer: LoadedTokenizer, metadata: Metadata) -> None:
    tokens = tokenizer.special_tokens_map
    first, last = (
        f"{tokens[f'{name}_token']} " if metadata.get(f"{_PREFIX}add_{name}_token") else "" for name in ("bos", "eos")
    )
    used = [token for token in (first.strip(), last.strip()) if token]
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A {last}".strip(),
        pair=f"{first}$A {last}$B:1 {last and last.strip() + ':1'}".strip(),
        special_tokens=[(token, tokenizer.backend.token_to_id(token)) for token in used],
    )
