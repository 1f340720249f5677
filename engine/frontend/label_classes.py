"""Classes that a request brings along, as label texts or as labelled examples, told apart by the model's embeddings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ..protocol.errors import InvalidRequestError
from ..protocol.results import ClassResult, EmbeddingResult
from ..tokenization.texts import Text
from .similarity import few_shot_scores, zero_shot_scores

Embed = Callable[[Sequence[Text]], Awaitable[EmbeddingResult]]


async def zero_shot(embed: Embed, inputs: Sequence[Text], labels: Sequence[str]) -> ClassResult:
    """Classifies inputs among label texts; `embed` gets all texts at once. See AsyncEngine.zero_shot."""
    _check_labels(labels, "labels")
    if len(set(labels)) != len(labels):
        raise InvalidRequestError("labels must name at least two different labels, each once.", param="labels")
    embedded = await embed([*inputs, *labels])
    scores = zero_shot_scores(embedded.embeddings[: len(inputs)], embedded.embeddings[len(inputs) :])
    return ClassResult(scores, tuple(labels), _counted(embedded.num_tokens, len(inputs)))


async def few_shot(embed: Embed, inputs: Sequence[Text], examples: Sequence[tuple[str, str]]) -> ClassResult:
    """Classifies inputs given examples (text, label); `embed` gets all texts at once. See AsyncEngine.few_shot."""
    labels = list(dict.fromkeys(label for _, label in examples))
    _check_labels(labels, "examples")
    embedded = await embed([*inputs, *(text for text, _ in examples)])
    places = {label: place for place, label in enumerate(labels)}
    label_ids = [places[label] for _, label in examples]
    vectors = embedded.embeddings
    scores = few_shot_scores(vectors[: len(inputs)], vectors[len(inputs) :], label_ids, len(labels))
    return ClassResult(scores, tuple(labels), _counted(embedded.num_tokens, len(inputs)))


def _check_labels(labels: Sequence[str], field: str) -> None:
    if len(set(labels)) < 2:
        raise InvalidRequestError(f"{field} must name at least two different labels.", param=field)


def _counted(num_tokens: list[int], num_inputs: int) -> list[int]:
    """Returns the tokens of each input; what labels or examples took is added to the first."""
    return [num_tokens[0] + sum(num_tokens[num_inputs:]), *num_tokens[1:num_inputs]]
