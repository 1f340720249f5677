"""Tells whether a language model is a reranker, which tokens are its answers, and which prompt it reads a pair in.

The order is: the operator (`--hf-overrides`, in vLLM's keys), sentence-transformers' files, the recipes by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import ModelLoadError
from ..protocol.model_info import ClassifierMethod
from ..protocol.templates import ScoreTemplate
from .draft import ModelDraft
from .reranker_recipes import QWEN3_RERANKER, RECIPES, Answers, RerankerRecipe, find_recipe, recipe_named

_TOKENS_KEY: Final = "classifier_from_token"
_METHOD_KEY: Final = "method"
_QWEN3_KEY: Final = "is_original_qwen3_reranker"
_TEMPLATE_KEY: Final = "score_template"
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForSequenceClassification")


def find_answers(draft: ModelDraft, architecture: str) -> Answers | None:
    """Returns the answers of a language model that is a reranker or classifier; None for any other model.

    Raises:
        ModelLoadError: A setting is wrong.
    """
    config, files = draft.config, draft.files
    if not architecture.endswith(_HEADS):
        if config.get(_TOKENS_KEY) is not None:
            raise ModelLoadError(
                f"{draft.source_of(_TOKENS_KEY)} needs a language model; {draft.name} is a {architecture}."
            )
        return None
    if config.get(_TOKENS_KEY) is not None:
        tokens = _listed_tokens(draft)
        return Answers(tokens, _method(draft, len(tokens)), draft.source_of(_TOKENS_KEY))
    if config.get(_QWEN3_KEY) is True:
        return Answers(QWEN3_RERANKER.tokens, QWEN3_RERANKER.method, draft.source_of(_QWEN3_KEY))
    if files is not None and files.logit_score is not None:
        score = files.logit_score
        if score.false_token_id is None:
            return Answers((score.true_token_id,), ClassifierMethod.NO_POST_PROCESSING, score.source)
        tokens = (score.false_token_id, score.true_token_id)
        return Answers(tokens, ClassifierMethod.FROM_2_WAY_SOFTMAX, score.source)
    recipe = None if architecture.endswith("ForSequenceClassification") else _recipe_of(draft)
    return None if recipe is None else Answers(recipe.tokens, recipe.method, _source_of(recipe))


def resolve_answers(draft: ModelDraft, answers: Answers | None) -> None:
    """Fills in the ids of the answers and what becomes of their logits; needs `path` and `vocab_size`.

    Raises:
        ModelLoadError: The tokenizer has no such token, or the model no such id.
    """
    if answers is None:
        draft.set("classifier_tokens", (), "default")
        draft.set("classifier_method", ClassifierMethod.FROM_2_WAY_SOFTMAX, "default")
        return
    ids = _token_ids(draft, answers)
    for token_id in ids:
        if not 0 <= token_id < draft.fields["vocab_size"]:
            raise ModelLoadError(
                f"{answers.source} of {draft.name} names the token id {token_id}; "
                f"the model has the ids 0 to {draft.fields['vocab_size'] - 1}."
            )
    draft.set("classifier_tokens", ids, answers.source)
    draft.set("classifier_method", answers.method, answers.source)


def resolve_score_template(draft: ModelDraft, *, is_pair_model: bool) -> None:
    """Fills in the prompt around a pair, for a model that reads pairs.

    Raises:
        ModelLoadError: The operator's template is wrong.
    """
    files, config = draft.files, draft.config
    draft.set("score_template", None, "default")
    draft.set("pair_chat", None, "default")
    if not is_pair_model:
        return
    if config.get(_TEMPLATE_KEY) is not None:
        draft.set("score_template", _given_template(draft), draft.source_of(_TEMPLATE_KEY))
    elif config.get(_QWEN3_KEY) is True:
        draft.set("score_template", QWEN3_RERANKER.template, draft.source_of(_QWEN3_KEY))
    elif files is not None and files.pair_chat is not None:
        draft.set("pair_chat", files.pair_chat, f"{files.transformer_source}: modality_config")
    elif (recipe := _recipe_of(draft)) is not None:
        draft.set("score_template", recipe.template, _source_of(recipe))


def _listed_tokens(draft: ModelDraft) -> tuple[str | int, ...]:
    tokens = draft.config[_TOKENS_KEY]
    if not isinstance(tokens, list) or not tokens or not all(type(token) in (str, int) for token in tokens):
        raise ModelLoadError(
            f"{draft.source_of(_TOKENS_KEY)} is {tokens!r}; it must be a list of tokens, as text or as id."
        )
    return tuple(tokens)


def _method(draft: ModelDraft, num_tokens: int) -> ClassifierMethod:
    """Returns the method that goes with classifier_from_token: two tokens are false and true unless it is named."""
    named, is_qwen3 = draft.config.get(_METHOD_KEY), draft.config.get(_QWEN3_KEY) is True
    if named is None:
        pair = is_qwen3 or num_tokens == 2
        method = ClassifierMethod.FROM_2_WAY_SOFTMAX if pair else ClassifierMethod.NO_POST_PROCESSING
    elif named in tuple(ClassifierMethod):
        method = ClassifierMethod(named)
    else:
        known = ", ".join(repr(known.value) for known in ClassifierMethod)
        raise ModelLoadError(f"{draft.source_of(_METHOD_KEY)} is {named!r}; penstock knows {known}.")
    if method is ClassifierMethod.FROM_2_WAY_SOFTMAX and num_tokens != 2:
        raise ModelLoadError(
            f"{draft.source_of(_TOKENS_KEY)} holds {num_tokens} tokens; {method.value} takes two, false and true."
        )
    return method


def _token_ids(draft: ModelDraft, answers: Answers) -> tuple[int, ...]:
    """Returns the vocabulary ids of the answers; reads the tokenizer only where they are given as text."""
    if all(isinstance(token, int) for token in answers.tokens):
        return tuple(int(token) for token in answers.tokens)
    from tokenizers import Tokenizer

    path = Path(draft.fields["path"]) / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{answers.source} of {draft.name} names tokens, but {path} does not exist; "
            f"give their ids with --hf-overrides {_TOKENS_KEY}."
        )
    tokenizer = Tokenizer.from_file(str(path))
    return tuple(_token_id(tokenizer, token, draft, answers.source) for token in answers.tokens)


def _token_id(tokenizer: Any, token: str | int, draft: ModelDraft, source: str) -> int:
    if isinstance(token, int):
        return token
    known: int | None = tokenizer.token_to_id(token)
    if known is not None:
        return known
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False).ids
    if len(ids) != 1:
        raise ModelLoadError(f"{source}: {token!r} is not one token of {draft.name}, but {len(ids)}.")
    return ids[0]


def _given_template(draft: ModelDraft) -> ScoreTemplate:
    value, source = draft.config[_TEMPLATE_KEY], draft.source_of(_TEMPLATE_KEY)
    if isinstance(value, str):
        recipe = recipe_named(value)
        if recipe is None:
            known = ", ".join(repr(recipe.name) for recipe in RECIPES)
            raise ModelLoadError(f"{source} is {value!r}; known are {known}, or an object with parts.")
        return recipe.template
    if not isinstance(value, dict):
        raise ModelLoadError(f"{source} is {value!r}; it must be the name of a recipe or an object with parts.")
    try:
        return ScoreTemplate.from_dict(value)
    except ValueError as error:
        raise ModelLoadError(f"{source}: {error}") from error


def _recipe_of(draft: ModelDraft) -> RerankerRecipe | None:
    """Returns the recipe that the model's name stands for. Modules after the Transformer say that it is another."""
    files = draft.files
    if files is not None and (files.pooling is not None or files.dense or files.has_normalize):
        return None
    return find_recipe(str(draft.config.get("model_type")), _names(draft))


def _names(draft: ModelDraft) -> Iterator[str]:
    """Names that the model goes by: as given, as in the hub's cache, and as config.json remembers it."""
    for name in (draft.name, draft.config.get("_name_or_path")):
        if isinstance(name, str) and name:
            parts = Path(name).parts
            yield parts[-1] if parts else name
            yield from (part for part in parts if part.startswith("models--"))


def _source_of(recipe: RerankerRecipe) -> str:
    return f"recipe {recipe.name}, by the model's name"
