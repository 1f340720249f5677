"""Cohere's embed, tokenize and detokenize, v1 and v2, as its clients send and read them.

Its rerank is in rerank.py and its classify in classify.py: other dialects share their routes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from penstock.engine import ModelInfo, PoolingParams, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError

from ..dialects import COHERE, keys_ignored_by
from ..wire.json_bodies import COHERE_TAG
from ..wire.json_schema import documented
from .encodings import EmbeddingTypes
from .inputs import Contents, SomeTokenIds, Texts
from .options import PRIORITY, CohereTruncate, Count, Priority, RequestBody, Width
from .rerank import VersionMeta

_ENDPOINTS: Final = {
    "embed": (PoolingTask.EMBED,),
    "rerank": (PoolingTask.SCORE,),
    "classify": (PoolingTask.CLASSIFY, PoolingTask.EMBED),  # by the classes of the model, or by examples
}


def cohere_endpoints(model: ModelInfo) -> list[str]:
    """Returns Cohere's names of the endpoints that the model serves."""
    return [name for name, tasks in _ENDPOINTS.items() if any(task in model.tasks for task in tasks)]


_NO_IMAGES: Final = WithJsonSchema({"type": "array", "items": {}, "maxItems": 0})


class CohereBody(RequestBody):
    """Base of Cohere's own bodies."""

    tag: ClassVar[str] = COHERE_TAG
    ignored_keys: ClassVar = keys_ignored_by(COHERE)


class CohereEmbedRequest(CohereBody):
    """Body of POST /v1/embed and /v2/embed."""

    model_config = documented(
        {"texts": ["A gate holds the water."], "input_type": "search_document", "embedding_types": ["float"]},
        {"texts": ["What holds the water?"], "input_type": "search_query", "embedding_types": ["int8"]},
        one_of=("texts", "inputs"),
    )

    prompt_fields: ClassVar = ("input_type",)

    texts: Texts | None = Field(None, description="Texts.")
    inputs: Contents | None = Field(None, description="Texts as objects of contents, instead of `texts`.")
    images: Annotated[list[Any], _NO_IMAGES] | None = Field(None, description="Refused: the served models embed text.")
    input_type: str | None = Field(
        None,
        description="What the texts are for, such as search_query or search_document: chooses the model's prompt.",
    )
    embedding_types: EmbeddingTypes | None = Field(
        None, description="Forms to answer with, all from one pass. Absent: float; v1 then answers with plain lists."
    )
    output_dimension: Width | None = Field(None, description="Width of the embeddings (Matryoshka).")
    truncate: CohereTruncate | None = Field(
        None, description="The side of an over-long text that is cut: END (default), START; NONE refuses it."
    )
    max_tokens: Count | None = Field(
        None, description="Tokens. What is over-long, special tokens and prompt included; 0 or absent: the model's own."
    )
    priority: Priority | None = PRIORITY

    def field_names(self) -> Mapping[str, str]:
        """See JsonBody."""
        return {
            "input": "texts" if self.texts is not None else "inputs",
            "dimensions": "output_dimension",
            "truncate_prompt_tokens": "max_tokens",
            "cut_to_fit": "truncate to START or END",
        }

    def contents(self) -> list[str]:
        """Returns the texts to embed.

        Raises:
            InvalidRequestError: There are images, or not exactly one of `texts` and `inputs`.
        """
        if self.images:
            raise InvalidRequestError(
                "images are given, but the served model embeds text only; send texts.", param="images"
            )
        if (self.texts is None) == (self.inputs is None):
            has = "neither" if self.texts is None else "both"
            raise InvalidRequestError(f"Give one of texts and inputs; the body has {has}.", param="texts")
        return self.texts if self.texts is not None else list(self.inputs or ())

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns the pooling parameters. As with Cohere, a text is cut to fit unless the request forbids."""
        longest = (model.max_embed_len or sys.maxsize) if model.enable_chunked_processing else model.max_model_len
        return PoolingParams(
            dimensions=self.output_dimension,
            truncate_prompt_tokens=self.max_tokens if self.max_tokens and self.max_tokens < longest else -1,
            refuse_too_long=self.truncate is CohereTruncate.NONE,
            truncation_side="left" if self.truncate is CohereTruncate.START else "right",
        )


class InputTokens(BaseModel):
    """Cohere's units: tokens as the model saw them."""

    input_tokens: int
    image_tokens: int = Field(description="0: the served models read text.")


class CohereEmbedMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: InputTokens


class EmbeddingsByType(BaseModel):
    """One list per form that was asked for, each with one entry per text."""

    float_: list[list[float]] | None = Field(None, alias="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = Field(None, description="A bit per dimension, eight to a signed byte.")
    ubinary: list[list[int]] | None = Field(None, description="A bit per dimension, eight to an unsigned byte.")
    base64: list[str] | None = Field(None, description="Base64 of little-endian float32.")


class _EmbedResponse(BaseModel):
    id: str
    texts: list[str]
    meta: CohereEmbedMeta


class CohereEmbedByTypeResponse(_EmbedResponse):
    """Answer of POST /v2/embed, and of /v1/embed with `embedding_types`."""

    response_type: Literal["embeddings_by_type"]
    embeddings: EmbeddingsByType


class CohereEmbedFloatsResponse(_EmbedResponse):
    """Answer of POST /v1/embed without `embedding_types`."""

    response_type: Literal["embeddings_floats"]
    embeddings: list[list[float]]


class CohereTokenizeRequest(CohereBody):
    """Body of POST /v1/tokenize."""

    model_config = documented({"text": "A gate holds the water."})

    text: str = Field(description="The text.")


class CohereDetokenizeRequest(CohereBody):
    """Body of POST /v1/detokenize."""

    own_names: ClassVar = {"input": "tokens"}
    model_config = documented({"tokens": [7592, 2088]})

    tokens: SomeTokenIds = Field(description="Token ids of the served model.")


class CohereTokenizeResponse(BaseModel):
    """Answer of POST /v1/tokenize: the tokens of the text itself, without special ones around it."""

    tokens: list[int]
    token_strings: list[str]
    meta: VersionMeta


class CohereDetokenizeResponse(BaseModel):
    """Answer of POST /v1/detokenize."""

    text: str
    meta: VersionMeta
