"""Rerankers that are published as plain language models, and the prompts that their publishers score with.

Their config.json says nothing of a reranker, so these are known by name. Facts only; each recipe names its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..protocol.model_info import ClassifierMethod
from ..protocol.templates import ScoreTemplate

_SYSTEM_OPEN: Final = "<|im_start|>system\n"
_USER_OPEN: Final = "<|im_end|>\n<|im_start|>user\n"
_ASSISTANT_OPEN: Final = "<|im_end|>\n<|im_start|>assistant\n"
_MXBAI_TASK: Final = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:"
)


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens whose next-token logits are a model's classes.

    Attributes:
        tokens: As text or as vocabulary id.
        method: What becomes of their logits.
        source: Where that is written.
    """

    tokens: tuple[str | int, ...]
    method: ClassifierMethod
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names, in the order of the columns."""
        classes = self.tokens[1:] if self.method is ClassifierMethod.FROM_2_WAY_SOFTMAX else self.tokens
        return tuple(token if isinstance(token, str) else f"LABEL_{i}" for i, token in enumerate(classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerRecipe:
    """What must be known about one published line of models.

    Attributes:
        name: What messages call it, and what `score_template` may name it by.
        pattern: Of model names, in lower case.
        model_type: That the models have.
        tokens: The answers whose next-token logits are the score: false and true, or the one that counts.
        method: What becomes of these logits.
        template: The prompt.
    """

    name: str
    pattern: str
    model_type: str
    tokens: tuple[str, ...]
    method: ClassifierMethod
    template: ScoreTemplate


# Model card of Qwen/Qwen3-Reranker-0.6B, "Transformers Usage": the user's turn is tokenized as one text and cut, the
# tokens before and after it are added.
QWEN3_RERANKER: Final = RerankerRecipe(
    name="qwen3-reranker",
    pattern=r"qwen3-reranker",
    model_type="qwen3",
    tokens=("no", "yes"),
    method=ClassifierMethod.FROM_2_WAY_SOFTMAX,
    template=ScoreTemplate(
        parts=(
            _SYSTEM_OPEN + "Judge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".' + _USER_OPEN,
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            _ASSISTANT_OPEN + "<think>\n\n</think>\n\n",
        ),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
)
RECIPES: Final = (
    QWEN3_RERANKER,
    # mixedbread-ai/mxbai-rerank, mxbai_rerank_v2.py: every piece is tokenized by itself. Its optional normalisation
    # subtracts 4.5 (base) or 6 (large) before the sigmoid: logit_mean of --pooler-config.
    RerankerRecipe(
        name="mxbai-rerank-v2",
        pattern=r"mxbai-rerank-\w+-v2",
        model_type="qwen2",
        tokens=("0", "1"),
        method=ClassifierMethod.FROM_2_WAY_SOFTMAX,
        template=ScoreTemplate(
            parts=(
                _SYSTEM_OPEN + "You are Qwen, created by Alibaba Cloud. You are a helpful assistant." + _USER_OPEN,
                "{instruction}query: {query}",
                "\n",
                "document: {document}",
                "\n",
                _MXBAI_TASK,
                _ASSISTANT_OPEN,
            ),
            instruction_format="instruction: {instruction}\n",
        ),
    ),
    # Model card of BAAI/bge-reranker-v2-gemma, "LLM-based reranker": get_inputs, whose `prompt` is the instruction.
    # The card's scores are the bare logits: use_activation false; by default they pass a sigmoid, as FlagEmbedding's
    # normalize=True does.
    RerankerRecipe(
        name="bge-reranker-v2-gemma",
        pattern=r"bge-reranker-v2-gemma",
        model_type="gemma",
        tokens=("Yes",),
        method=ClassifierMethod.NO_POST_PROCESSING,
        template=ScoreTemplate(
            parts=("<bos>", "A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
            instruction="Given a query A and a passage B, determine whether the passage contains an answer to the "
            "query by providing a prediction of either 'Yes' or 'No'.",
        ),
    ),
)


def recipe_named(name: str) -> RerankerRecipe | None:
    """Returns the recipe that is called `name`."""
    return next((recipe for recipe in RECIPES if recipe.name == name), None)


def find_recipe(model_type: str, names: Iterable[str]) -> RerankerRecipe | None:
    """Returns the recipe for a model of that type that goes by one of these names."""
    lowered = [name.lower() for name in names]
    for recipe in RECIPES:
        if recipe.model_type == model_type and any(re.search(recipe.pattern, name) for name in lowered):
            return recipe
    return None
