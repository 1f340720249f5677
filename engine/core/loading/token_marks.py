"""Finds the tokens of a multi-vector model's recipe in its tokenizer, in the engine process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tokenizers import AddedToken

from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo
from ...protocol.vectors import MultiVector, QueryExpansion, RecipeTokens
from .loaded_tokenizer import LoadedTokenizer

logger = logging.getLogger("penstock.engine")


def register_markers(tokenizer: LoadedTokenizer, recipe: MultiVector) -> None:
    """Lets the tokenizer read each marker that its vocabulary holds as one token, as the model was trained on it.

    Read as text, "[unused0]" would be four tokens. Markers that the vocabulary does not hold stay text.

    Args:
        tokenizer: Modified.
        recipe: Names the markers.
    """
    backend = tokenizer.backend
    vocabulary = backend.get_vocab()
    for marker in recipe.markers:
        for token in (marker, *marker.split(None, 1)[:1]):
            if token in vocabulary:
                if backend.encode(token, add_special_tokens=False).tokens != [token]:
                    backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
                break


def find_recipe_tokens(tokenizer: LoadedTokenizer, info: ModelInfo) -> RecipeTokens:
    """Returns the ids of the recipe's tokens.

    Raises:
        UnsupportedModelError: The tokenizer does not have the expansion token, or fills up on the left.
    """
    recipe = info.multi_vector
    if info.token_heads is not None:
        own = (tokenizer.special_id(name) for name in ("cls_token", "eos_token", "pad_token", "unk_token"))
        return RecipeTokens(unweighted_ids=tuple(sorted({i for i in own if i is not None})))
    if recipe is None:
        return RecipeTokens()
    expansion_id = None if recipe.expansion is None else _expansion_id(tokenizer, recipe.expansion, info)
    return RecipeTokens(expansion_id=expansion_id, skip_ids=_ids(tokenizer, recipe.skip_words, info.name))


def _expansion_id(tokenizer: LoadedTokenizer, expansion: QueryExpansion, info: ModelInfo) -> int:
    if tokenizer.padding_side != "right":
        raise UnsupportedModelError(
            f"{info.name} fills queries up on the left, which penstock does not ({info.sources['multi_vector']})."
        )
    if expansion.token is not None:
        found = tokenizer.backend.get_vocab().get(expansion.token)
    else:
        mask_id = tokenizer.special_id("mask_token")
        found = mask_id if mask_id is not None else tokenizer.special_id("eos_token")
    if found is None or not 0 <= found < info.vocab_size:
        raise UnsupportedModelError(
            f"{info.name} fills queries up with the token {expansion.token or 'for masks'!r} "
            f"({info.sources['multi_vector']}), which its tokenizer or the model does not have."
        )
    return int(found)


def _ids(tokenizer: LoadedTokenizer, words: Sequence[str], name: str) -> tuple[int, ...]:
    """Returns the ids of words that are one token each."""
    vocabulary = tokenizer.backend.get_vocab()
    unknown = [word for word in words if word not in vocabulary]
    if unknown:
        logger.warning("%s: no tokens of the vocabulary, so left in documents: %s", name, " ".join(unknown))
    return tuple(vocabulary[word] for word in words if word in vocabulary)
