"""Resolves the tokenizer of a model in the engine process: from its files, or by transformers where those say more."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken

from ...model_files.model_folder import one_line, read_object
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from ...protocol.multi_vector import MultiVector, QueryExpansion, RecipeTokens
from ...protocol.templates import ScoreTemplate, chat_template_of
from ...tokenization.long_text import LongText
from ...tokenization.model_tokenizer import SpecialTokens
from .chat_score_template import chat_score_template
from .load_errors import needs_torch
from .tokenizer_classes import NotBuiltHereError
from .tokenizer_files import LoadedTokenizer, read_tokenizer

logger = logging.getLogger("penstock.engine")

_SAMPLE: Final = "One short text to begin with."
_OF_FILES: Final = {"vocab_file", "merges_file", "tokenizer_file", "name_or_path", "is_local", "local_files_only"}
"""What transformers adds to the settings of a tokenizer: where its files lie."""


def load_tokenizer(
    info: ModelInfo, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> TokenizerSpec:
    """Loads the tokenizer as transformers would and serialises it for clients.

    Args:
        info: The model.
        trust_remote_code: Run code that comes with it.
        chat_template: Replaces the model's own.

    Raises:
        UnsupportedModelError: The model has no tokenizer that the `tokenizers` library can run.
        ModelLoadError: Its tokenizer.json is damaged.
    """
    try:
        tokenizer = read_tokenizer(info)
    except NotBuiltHereError as why:
        logger.info("the tokenizer of %s is read by transformers, which takes a second: %s.", info.name, why)
        with needs_torch(f"the tokenizer of {info.name}", str(why)):
            tokenizer = _through_transformers(info, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if info.multi_vector is not None:
        register_markers(tokenizer, info.multi_vector)
    backend = tokenizer.backend
    try:
        sample_ids, type_ids = backend.encode(_SAMPLE).ids, backend.encode("a", "b").type_ids
        special_tokens = SpecialTokens.of(backend)
    except Exception as error:  # as above
        path = Path(info.path) / "tokenizer.json"
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} ({path}) cannot read a text: {one_line(error)}"
        ) from error
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
    usable_ids = tuple(token_id for token_id in sample_ids if token_id < info.vocab_size)
    if not usable_ids:
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} does not fit the model: it makes the ids {min(sample_ids)} to "
            f"{max(sample_ids)} of {_SAMPLE!r}, but the model has embeddings for 0 to {info.vocab_size - 1} only."
        )
    if sample_ids[-1] not in tokenizer.all_special_ids and _asks_for_end(info):
        logger.warning(
            "tokenizer_config.json of %s has add_eos_token, but its tokenizer.json adds no token at the end; "
            "tokenizer.json counts, as in transformers 5.",
            info.name,
        )
    LongText.of(info, special_tokens)  # refuses settings that do not fit the tokenizer
    uses_token_types = "token_type_ids" in tokenizer.model_input_names and info.config.get("type_vocab_size", 2) > 1
    if uses_token_types and type_ids != sorted(type_ids):
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} mixes token types within a text; "
            "penstock knows one block of type 0, then one of type 1."
        )
    return TokenizerSpec(
        json=backend.to_str(),
        truncation_side=tokenizer.truncation_side,
        uses_token_types=uses_token_types,
        sample_ids=usable_ids,
        score_template=_score_template(tokenizer, info, chat_template),
        chat_template=chat_template_of(tokenizer),
        recipe_tokens=find_recipe_tokens(tokenizer, info),
        end_id=_end_id(tokenizer, info.vocab_size),
        config=_config(tokenizer),
    )


def _config(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """Returns what a tokenizer was made of, without the places of its files, and with the chat template in use.

    The number that stands for a model_max_length which nobody knows is more than a message can hold: it is left out.
    """
    config = {name: _plain(value) for name, value in tokenizer.settings.items() if name not in _OF_FILES}
    longest = config.get("model_max_length")
    if longest is None or longest >= 2**63:
        config.pop("model_max_length", None)
    if tokenizer.chat_template:
        config["chat_template"] = _plain(tokenizer.chat_template)
    return {**config, "tokenizer_class": tokenizer.class_name}


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; an added token is its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _through_transformers(info: ModelInfo, trust_remote_code: bool) -> LoadedTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(info.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises no other class for a file that it cannot read
        read_object(Path(info.path) / "tokenizer.json")  # names the fault of a file that is no JSON object
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} in {info.path} cannot be loaded: {one_line(error)}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedModelError(
            f"The tokenizer of {info.name} ({type(tokenizer).__name__}) has no tokenizer.json form; "
            "convert it with transformers' fast tokenizers and save it in the model folder."
        )
    return LoadedTokenizer.of_transformers(tokenizer)


def _end_id(tokenizer: LoadedTokenizer, vocab_size: int) -> int | None:
    """Returns the token that ends a text, or pads or begins one, where the model has an embedding of it."""
    ids = (tokenizer.special_id(name) for name in ("eos_token", "pad_token", "bos_token"))
    return next((token_id for token_id in ids if token_id is not None and 0 <= token_id < vocab_size), None)


def _asks_for_end(info: ModelInfo) -> bool:
    """Whether the model's settings want a token after each text. transformers 5 leaves that to tokenizer.json."""
    return read_object(Path(info.path) / "tokenizer_config.json").get("add_eos_token") is True


def _score_template(tokenizer: LoadedTokenizer, info: ModelInfo, chat_template: str | None) -> ScoreTemplate | None:
    """Returns the prompt around a pair: the one that is known, or the one that the chat template makes."""
    chat, render = info.pair_chat, tokenizer.render
    if chat is None or render is None:
        if info.score_template is None and info.classifier_tokens and info.kind is ModelKind.CROSS_ENCODER:
            logger.warning(
                "%s answers with a word but has no prompt for pairs: a query and a document are joined bare. "
                "Give the prompt it was trained on with --hf-overrides score_template.",
                info.name,
            )
        return info.score_template

    def rendered(messages: list[dict[str, Any]]) -> str:
        return str(render(messages, chat_template=chat_template, tokenize=False, **chat.arguments))

    prompt = info.prompts[info.default_prompt_name] if info.default_prompt_name is not None else None
    return chat_score_template(rendered, chat, prompt, info.name)


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
