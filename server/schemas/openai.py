"""OpenAI's embeddings and models, as its clients send and read them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.engine.params import PoolingParams

from ..encoding import EncodingFormat
from .common import Inputs, PoolingBody, Usage, WholeNumber


class EmbeddingRequest(PoolingBody):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "all-MiniLM-L6-v2", "input": ["A gate holds the water.", "A pipe carries it."]},
                {"input": "One text is fine too.", "encoding_format": "base64"},
                {"input": [101, 7592, 2088, 102]},
                {"input": ["Berlin is a city.", " It lies on the Spree."], "late_chunking": True},
            ]
        }
    )

    input: Inputs = Field(description="A text, a list of texts, the token ids of one text, or a list of such lists.")
    encoding_format: EncodingFormat | None = Field(
        None, description="'float' (default) or 'base64' (little-endian float32)."
    )
    dimensions: WholeNumber | None = Field(None, description="Width of the embeddings (Matryoshka).")
    normalize: bool | None = Field(None, description="L2-normalise; absent: as the model does.")
    prompt_name: str | None = Field(None, description="Named prompt of the model to put before every text.")
    late_chunking: bool | None = Field(
        None,
        description=(
            "Run all inputs as one text, in their order and with nothing put between them, and answer each with the "
            "mean of its own tokens, so that every vector knows the whole text. For models that pool by MEAN; the "
            "inputs together must fit the model's maximum, or truncate_prompt_tokens cuts the text as a whole. The "
            "prompt is put once before the first text."
        ),
    )

    def pooling_params(self) -> PoolingParams:
        """Returns what the request asks of pooling."""
        return super().pooling_params().clone(dimensions=self.dimensions, normalize=self.normalize)


class EmbeddingRow(BaseModel):
    """One embedding, in the order of the inputs."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Floats, or base64 of little-endian float32.")


class EmbeddingResponse(BaseModel):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingRow]
    usage: Usage


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Tokens. Longest input.")


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
