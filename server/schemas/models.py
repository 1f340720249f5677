"""The list of models, and the bodies that load and unload one, in llama.cpp's words."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from penstock.engine import PoolingTask, PoolingType
from penstock.engine.protocol.model_info import ModelKind

from ..wire.json_bodies import JsonBody
from ..wire.json_schema import documented
from .encode import Output


class ModelFacts(BaseModel):
    """What a model is and can; names and values are those of `penstock info`."""

    kind: ModelKind
    tasks: list[PoolingTask]
    outputs: list[Output] = Field(description="Vectors that it was trained to give: what /v1/encode answers unasked.")
    model_type: str
    dtype: str
    sequence_pooling: list[PoolingType]
    embedding_size: int = Field(description="Width of its embeddings; 0 where it gives none.")
    is_matryoshka: bool = Field(description="`dimensions` may be any up to embedding_size.")
    matryoshka_dimensions: list[int] = Field(description="The widths that it declares, if it names them.")
    prompts: dict[str, str] = Field(description="Its prompts by name.")
    default_prompt_name: str | None = Field(description="The prompt of requests that name none.")
    num_labels: int = Field(description="Classes of its own.")


class ModelLife(BaseModel):
    """Where a model is, in llama.cpp's words, and its engine."""

    value: Literal["unloaded", "loading", "loaded", "leaving", "failed"]
    state: str = Field(description="As /health has it: of the engine, where there is one.", examples=["ready"])


class ModelCard(BaseModel):
    """One served model. `name`, `endpoints` and `context_length` are what Cohere's clients read.

    What is only known once a model has been loaded is null or empty before.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Tokens. Longest input.")
    name: str
    aliases: list[str] = Field(description="Its other names.")
    endpoints: list[Literal["embed", "rerank", "classify"]]
    context_length: int | None = Field(description="Tokens. Longest input.")
    status: ModelLife
    facts: ModelFacts | None = Field(description="penstock's own; its playground reads them.")


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[ModelCard] = Field(description="The same for Cohere's clients.")


class ModelRequest(JsonBody):
    """Body of POST /models/load and /models/unload."""

    model_config = documented({"model": "all-MiniLM-L6-v2"})

    model: str = Field(description="One of its names.")
