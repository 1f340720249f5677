"""Classification in three dialects on one route: vLLM's `input`, Infinity's with `raw_scores`, Cohere's `inputs`.

With an embedding model the classes come with the request: `labels` (zero-shot) or `examples` (few-shot).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import BaseModel, Field

from penstock.engine import PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError

from ..dialects import COHERE, INFINITY, VLLM, keys_ignored_by
from ..wire.json_schema import documented
from .chat import InputFields
from .inputs import Text, TextOrTexts
from .options import Answer, CohereTruncate, Flag, ListAnswer, Listed, PoolingBody, parse_truncate, truncated
from .rerank import VersionMeta
from .tei import TeiPrediction

MAX_SCORES: Final = 1_000_000  # Classes of a request times its inputs, which are compared on the event loop.


class Example(BaseModel):
    """A labelled example of Cohere's classify."""

    text: str
    label: str


class ClassifyRequest(InputFields, PoolingBody):
    """Body of POST /classify."""

    model_config = documented(
        {"input": ["I love this.", "I hate it."], "labels": ["praise", "complaint"]},
        {
            "inputs": ["Where is my parcel?"],
            "examples": [
                {"text": "When will it arrive?", "label": "shipping"},
                {"text": "I want my money back.", "label": "refund"},
            ],
        },
        one_of=("input", "messages", "inputs"),
    )

    ignored_keys: ClassVar = keys_ignored_by(VLLM, INFINITY, COHERE)
    prompt_fields: ClassVar = ("instruction",)

    inputs: TextOrTexts | None = Field(None, description="Texts; the answer is Cohere's.")
    labels: Listed[str] | None = Field(None, description="Classes for an embedding model, as texts (zero-shot).")
    examples: Listed[Example] | None = Field(None, description="Labelled texts for an embedding model (few-shot).")
    instruction: str | None = Field(
        None,
        description="For embedding models with a prompt of the form `Instruct: ...`: replaces its instruction.",
    )
    truncate: CohereTruncate | None = Field(None, description="Cohere: the side that is cut; END where it is absent.")
    raw_scores: Flag | None = Field(
        None,
        description=(
            "Infinity's: true leaves the activation out. With it, be it false, `input` gets Infinity's answer, and is "
            "cut to fit."
        ),
    )

    def field_names(self) -> Mapping[str, str]:
        """See JsonBody."""
        return super().field_names() if self.inputs is None or self.input is not None else {"input": "inputs"}

    def is_infinity(self) -> bool:
        """Returns whether a client of Infinity asks, which sends `raw_scores` always."""
        return "raw_scores" in self.model_fields_set and self.inputs is None

    def texts(self) -> list[Text]:
        """Returns the inputs that are not chats."""
        return super().texts() if self.inputs is None else list(self.inputs)

    def check_given(self) -> None:
        """Raises InvalidRequestError unless exactly one of `input`, `messages` and `inputs` is there."""
        given = [name for name in ("input", "messages", "inputs") if getattr(self, name) is not None]
        if len(given) != 1:
            has = f"both {' and '.join(given)}" if given else "neither"
            raise InvalidRequestError(
                f"Give one of input or messages (vLLM's answer) and inputs (Cohere's answer); the body has {has}.",
                param="input",
            )

    def class_names(self) -> list[str]:
        """Returns the classes that come with the request; none: those of the model."""
        return list(dict.fromkeys(example.label for example in self.examples)) if self.examples else self.labels or []

    def check_classes(self) -> None:
        """Checks the classes that come with the request.

        Raises:
            InvalidRequestError: Both kinds are there, or chats, or the answer would hold too many scores.
        """
        if self.messages is not None and (self.labels or self.examples):
            raise InvalidRequestError(
                "messages are for classes of the model's own; with labels or examples send texts as input.",
                param="messages",
            )
        if self.labels and self.examples:
            raise InvalidRequestError("Give labels (zero-shot) or examples (few-shot), not both.", param="labels")
        field = "examples" if self.examples else "labels"
        num_classes, num_inputs = len(self.class_names()), len(self.texts())
        if num_inputs * num_classes > MAX_SCORES:
            raise InvalidRequestError(
                f"{num_inputs} inputs with {num_classes} classes in {field} give {num_inputs * num_classes} scores; "
                f"the limit is {MAX_SCORES}. Send fewer inputs at once.",
                param=field,
            )

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters. As with Cohere and Infinity, their texts are cut to fit."""
        truncate = self.truncate
        if truncate is None and (self.inputs is not None or self.is_infinity()):
            truncate = CohereTruncate.END
        params = super().pooling_params()
        if self.raw_scores and params.use_activation is None:
            params = params.clone(use_activation=False)
        return truncated(params, None if truncate is None else parse_truncate(truncate.value))


class ClassRow(BaseModel):
    """The class of one input, and the score of every class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ListAnswer[ClassRow]):
    """vLLM's answer of POST /classify."""


class InfinityClassifyResponse(Answer):
    """Infinity's answer of POST /classify: the classes of each input, best first."""

    object: Literal["classify"]
    data: list[list[TeiPrediction]]


class TokenClass(BaseModel):
    """The class of one token. Special tokens are there too, as the model saw them."""

    token: str
    token_id: int
    label: str
    score: float = Field(description="Score of `label`.")
    probs: list[float]


class TokenClassRow(BaseModel):
    """The classes of the tokens of one input."""

    index: int
    tokens: list[TokenClass]
    num_classes: int


class TokenClassifyResponse(ListAnswer[TokenClassRow]):
    """Answer of POST /classify by a token classifier, such as a named-entity model."""

    labels: list[str] = Field(description="Class names in the order of `probs`.")


class Confidence(BaseModel):
    """Confidence in one class."""

    confidence: float


class Classification(BaseModel):
    """Cohere's answer for one input."""

    id: str
    input: str
    prediction: str
    predictions: list[str]
    confidence: float
    confidences: list[float]
    labels: dict[str, Confidence]
    classification_type: Literal["single-label", "multi-label"]


class Classifications(BaseModel):
    """Cohere's unit: an input."""

    classifications: int


class CohereClassifyMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: Classifications


class CohereClassifyResponse(BaseModel):
    """Cohere's answer of POST /classify."""

    id: str
    classifications: list[Classification]
    meta: CohereClassifyMeta
