"""Loads the tokenizer of a model in the engine process: from its files, or with transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

from ...families.static import MODEL2VEC, STATIC_MODEL_TYPES
from ...families.two_towers import PADDED_MODEL_TYPES
from ...model_files.model_folder import is_gguf, one_line, read_object
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind, TextPadding, TokenizerSpec
from ...protocol.multi_vector import MultiVector, MultiVectorTokens, QueryExpansion
from ...protocol.templates import ScoreTemplate, chat_template_of
from ...tokenization.long_text import LongText
from ...tokenization.model_tokenizer import SpecialTokens
from .chat_score_template import chat_score_template
from .gguf_tokenizer import build_gguf_tokenizer
from .input_prompts import input_prompts
from .load_errors import needs_torch
from .tokenizer_classes import NeedsTransformersError
from .tokenizer_files import LoadedTokenizer, read_static_tokenizer, read_tokenizer, unknown_id

logger = logging.getLogger("penstock.engine")

_SAMPLE: Final = "One short text to begin with."
_PATH_SETTINGS: Final = {"vocab_file", "merges_file", "tokenizer_file", "name_or_path", "is_local", "local_files_only"}
"""Settings that transformers adds: paths of the files."""


def load_tokenizer(
    info: ModelInfo, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> TokenizerSpec:
    """Loads the tokenizer as transformers would and serialises it for engine clients.

    A GGUF file uses the tokenizer.json beside it, or else its own metadata.

    Args:
        info: The model.
        trust_remote_code: Run Python code of the model's folder.
        chat_template: Replaces the model's own template.

    Raises:
        UnsupportedModelError: The model has no tokenizer that the `tokenizers` library can run.
        ModelLoadError: The tokenizer.json is damaged.
    """
    tokenizer = _read(info, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if info.multi_vector is not None:
        register_markers(tokenizer, info.multi_vector)
    sample_ids = _usable_sample(tokenizer, info)
    backend = tokenizer.backend
    LongText.of(info, SpecialTokens.of(backend))  # raises an error for settings that do not fit the tokenizer
    template = chat_template_of(tokenizer)
    return TokenizerSpec(
        json=backend.to_str(),
        truncation_side=tokenizer.truncation_side,
        uses_token_types=_uses_token_types(tokenizer, info),
        sample_ids=sample_ids,
        score_template=_score_template(tokenizer, info, chat_template),
        chat_template=template,
        multi_vector_tokens=find_multi_vector_tokens(tokenizer, info),
        end_id=_end_id(tokenizer, info),
        padding=_padding(tokenizer, info),
        input_prompts=input_prompts(info, backend, template, tokenizer.special_tokens_map),
        dropped_id=unknown_id(backend) if info.model_type == MODEL2VEC else None,
        chars_per_token=_median_length(backend) if info.model_type == MODEL2VEC else None,
        config=_config(tokenizer),
    )


def _read(info: ModelInfo, *, trust_remote_code: bool) -> LoadedTokenizer:
    folder = _folder(info)
    try:
        if info.model_type in STATIC_MODEL_TYPES:
            return read_static_tokenizer(info)
        if is_gguf(info.path) and not (folder / "tokenizer.json").exists():
            return build_gguf_tokenizer(Path(info.path))
        return read_tokenizer(info, folder)
    except NeedsTransformersError as why:
        logger.info("reading the tokenizer of %s with transformers, which takes a second: %s.", info.name, why)
        with needs_torch(f"the tokenizer of {info.name}", str(why)):
            return _load_with_transformers(info, folder, trust_remote_code)


def _folder(info: ModelInfo) -> Path:
    return Path(info.path).parent if is_gguf(info.path) else Path(info.path)


def _usable_sample(tokenizer: LoadedTokenizer, info: ModelInfo) -> tuple[int, ...]:
    """Returns the ids of a sample text that the model has embeddings for. Warns of settings that do not fit together.

    Raises:
        UnsupportedModelError: The tokenizer cannot read the text, knows no word of it, or does not fit the model.
    """
    backend = tokenizer.backend
    try:
        sample_ids = backend.encode(_SAMPLE).ids
        backend.encode("a", "b")
    except Exception as error:  # the tokenizers library raises Exception
        path = _folder(info) / "tokenizer.json"
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} ({path}) cannot read a text: {one_line(error)}"
        ) from error
    if set(sample_ids) <= set(tokenizer.all_special_ids):
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} knows no word of {_SAMPLE!r}: {info.path} has neither a tokenizer.json "
            "nor a vocabulary from which transformers could build one."
        )
    if backend.get_vocab_size() > info.vocab_size:
        logger.warning(
            "the tokenizer of %s has %d tokens, but the model has %d embeddings; texts with other tokens are rejected.",
            info.name,
            backend.get_vocab_size(),
            info.vocab_size,
        )
    usable_ids = tuple(token_id for token_id in sample_ids if token_id < info.vocab_size)
    if not usable_ids:
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} does not fit the model: it encodes {_SAMPLE!r} with the ids "
            f"{min(sample_ids)} to {max(sample_ids)}, but the model has embeddings for 0 to {info.vocab_size - 1} only."
        )
    if sample_ids[-1] not in tokenizer.all_special_ids and _has_add_eos_token(info):
        logger.warning(
            "tokenizer_config.json of %s has add_eos_token, but its tokenizer.json adds no token at the end; "
            "tokenizer.json takes precedence, as in transformers 5.",
            info.name,
        )
    return usable_ids


def _uses_token_types(tokenizer: LoadedTokenizer, info: ModelInfo) -> bool:
    """Whether the second text of a pair has another token type. Raises UnsupportedModelError if the types are mixed."""
    if "token_type_ids" not in tokenizer.model_input_names or info.config.get("type_vocab_size", 2) <= 1:
        return False
    type_ids = tokenizer.backend.encode("a", "b").type_ids
    if type_ids != sorted(type_ids):
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} mixes token types within a text; "
            "penstock supports one block of type 0, then one of type 1."
        )
    return True


def _median_length(backend: Tokenizer) -> int:
    return max(int(np.median([len(token) for token in backend.get_vocab()])), 1)


def _config(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """Returns the settings of a tokenizer without paths of files, with the chat template in use."""
    config = {name: _plain(value) for name, value in tokenizer.settings.items() if name not in _PATH_SETTINGS}
    longest = config.get("model_max_length")
    if longest is None or longest >= 2**63:  # transformers' value for an unknown length does not fit into a message
        config.pop("model_max_length", None)
    if tokenizer.chat_template:
        config["chat_template"] = _plain(tokenizer.chat_template)
    return {**config, "tokenizer_class": tokenizer.class_name}


def _plain(value: Any) -> Any:
    """Returns a value as JSON types. An added token becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _load_with_transformers(info: ModelInfo, folder: Path, trust_remote_code: bool) -> LoadedTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception for an unreadable file
        read_object(folder / "tokenizer.json")  # raises a better error if the file is not a JSON object
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} in {folder} cannot be loaded: {one_line(error)}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} ({type(tokenizer).__name__}) has no fast version; "
            "convert it with transformers' fast tokenizers and save it in the model folder."
        )
    return LoadedTokenizer.of_transformers(tokenizer)


def _padding(tokenizer: LoadedTokenizer, info: ModelInfo) -> TextPadding | None:
    """Returns the padding of the texts of SigLIP, which was trained with texts of one length; None for other models."""
    if info.model_type not in PADDED_MODEL_TYPES:
        return None
    token_id = tokenizer.backend.token_to_id(str(tokenizer.settings.get("pad_token")))
    if token_id is None:
        raise UnsupportedModelError(f"The tokenizer of {info.name} has no pad_token, which {info.architecture} needs.")
    length = info.config["max_position_embeddings"]
    return TextPadding(token_id=token_id, length=length, side=tokenizer.padding_side)


def _end_id(tokenizer: LoadedTokenizer, info: ModelInfo) -> int | None:
    """Returns the end, padding or start token: the first one with an embedding. Static: the row of zeros."""
    if info.model_type in STATIC_MODEL_TYPES:
        return info.vocab_size
    ids = (tokenizer.special_id(name) for name in ("eos_token", "pad_token", "bos_token"))
    return next((token_id for token_id in ids if token_id is not None and 0 <= token_id < info.vocab_size), None)


def _has_add_eos_token(info: ModelInfo) -> bool:
    return read_object(Path(info.path) / "tokenizer_config.json").get("add_eos_token") is True


def _score_template(tokenizer: LoadedTokenizer, info: ModelInfo, chat_template: str | None) -> ScoreTemplate | None:
    """Returns the prompt around a pair: that of the model info, or one derived from the chat template."""
    chat = info.pair_chat
    render = tokenizer.render
    if chat is None or render is None:
        if info.score_template is None and info.classifier_tokens and info.kind is ModelKind.CROSS_ENCODER:
            logger.warning(
                "%s is a generative reranker without a prompt for pairs: query and document are joined without one. "
                "Set the prompt of its training with --hf-overrides score_template.",
                info.name,
            )
        return info.score_template

    def rendered(messages: list[dict[str, Any]]) -> str:
        return str(render(messages, chat_template=chat_template, tokenize=False, **chat.arguments))

    prompt = info.prompts[info.default_prompt_name] if info.default_prompt_name is not None else None
    return chat_score_template(rendered, chat, prompt, info.name)


def register_markers(tokenizer: LoadedTokenizer, multi_vector: MultiVector) -> None:
    """Makes the tokenizer read each marker of its vocabulary as one token, as in the model's training.

    As text, "[unused0]" would be four tokens. Markers that are not in the vocabulary stay text.

    Args:
        tokenizer: Modified in place.
        multi_vector: Settings of the multi-vector model.
    """
    backend = tokenizer.backend
    vocabulary = backend.get_vocab()
    for marker in multi_vector.markers:
        for token in (marker, *marker.split(None, 1)[:1]):
            if token in vocabulary:
                if backend.encode(token, add_special_tokens=False).tokens != [token]:
                    backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
                break


def find_multi_vector_tokens(tokenizer: LoadedTokenizer, info: ModelInfo) -> MultiVectorTokens:
    """Returns the ids of the special tokens of a multi-vector model.

    Raises:
        UnsupportedModelError: The tokenizer does not have the expansion token, or pads on the left.
    """
    multi_vector = info.multi_vector
    if info.token_heads is not None:
        special_ids = (tokenizer.special_id(name) for name in ("cls_token", "eos_token", "pad_token", "unk_token"))
        return MultiVectorTokens(unweighted_ids=tuple(sorted({i for i in special_ids if i is not None})))
    if multi_vector is None:
        return MultiVectorTokens()
    expansion_id = None if multi_vector.expansion is None else _expansion_id(tokenizer, multi_vector.expansion, info)
    return MultiVectorTokens(expansion_id=expansion_id, skip_ids=_ids(tokenizer, multi_vector.skip_words, info.name))


def _expansion_id(tokenizer: LoadedTokenizer, expansion: QueryExpansion, info: ModelInfo) -> int:
    if tokenizer.padding_side != "right":
        raise UnsupportedModelError(
            f"{info.name} pads queries on the left, which penstock does not support ({info.sources['multi_vector']})."
        )
    if expansion.token is not None:
        found = tokenizer.backend.get_vocab().get(expansion.token)
    else:
        mask_id = tokenizer.special_id("mask_token")
        found = mask_id if mask_id is not None else tokenizer.special_id("eos_token")
    if found is None or not 0 <= found < info.vocab_size:
        raise UnsupportedModelError(
            f"{info.name} pads queries with the token {expansion.token or 'for masks'!r} "
            f"({info.sources['multi_vector']}), which its tokenizer or the model does not have."
        )
    return int(found)


def _ids(tokenizer: LoadedTokenizer, words: Sequence[str], name: str) -> tuple[int, ...]:
    vocabulary = tokenizer.backend.get_vocab()
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        logger.warning("%s: not in the vocabulary, so not removed from documents: %s", name, " ".join(unknown))
    return tuple(vocabulary[word] for word in words if word in vocabulary)
