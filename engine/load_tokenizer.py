"""Resolves the tokenizer of a model in the engine process, where transformers may be imported."""

from __future__ import annotations

import logging
from typing import Any, Final

from .errors import UnsupportedModelError
from .messages import TokenizerSpec
from .model_info import ModelInfo

logger = logging.getLogger("penstock.engine")

_SAMPLE: Final = "One short text to begin with."


def load_tokenizer(info: ModelInfo, *, trust_remote_code: bool = False) -> TokenizerSpec:
    """Loads the tokenizer as transformers would and serialises it for clients.

    Raises:
        UnsupportedModelError: The model has no tokenizer that the `tokenizers` library can run.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(info.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"The tokenizer of {info.name} cannot be loaded: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} ({type(tokenizer).__name__}) has no tokenizer.json form; "
            "convert it with transformers' fast tokenizers and save it in the model folder."
        )
    backend.no_truncation()
    backend.no_padding()
    sample_ids = backend.encode(_SAMPLE).ids
    if set(sample_ids) <= set(tokenizer.all_special_ids):
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} knows no word of {_SAMPLE!r}: {info.path} holds no tokenizer.json, "
            "nor a vocabulary that transformers could build one from."
        )
    if backend.get_vocab_size() > info.vocab_size:
        logger.warning(
            "the tokenizer of %s has %d tokens, but the model has %d embeddings; texts with the others are refused.",
            info.name,
            backend.get_vocab_size(),
            info.vocab_size,
        )
    uses_token_types = "token_type_ids" in tokenizer.model_input_names and info.config.get("type_vocab_size", 2) > 1
    type_ids = backend.encode("a", "b").type_ids
    if uses_token_types and type_ids != sorted(type_ids):
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} mixes token types within a text; "
            "penstock knows one block of type 0, then one of type 1."
        )
    return TokenizerSpec(
        json=backend.to_str(),
        truncation_side=tokenizer.truncation_side,
        uses_token_types=uses_token_types,
        sample_ids=tuple(sample_ids),
    )
