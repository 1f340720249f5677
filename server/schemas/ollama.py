"""Ollama's embeddings and its description of models, as its clients send and read them."""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field

from penstock.engine import ModelInfo, PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError

from ..dialects import OLLAMA, keys_ignored_by
from ..wire.json_bodies import JsonBody
from ..wire.json_schema import documented
from ..wire.shown_values import shown
from .inputs import TextOrTexts
from .options import Count, Flag, RequestBody, Width

_UNIT_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNIT_S)})"
_DURATION: Final = rf"^-?([0-9]+(\.[0-9]+)?|({_PART})+)$"


def _seconds(value: object) -> object:
    """Returns the seconds of a number of seconds, or of a duration as Go writes it; below 0 is for ever."""
    seconds = value
    if isinstance(value, str) and re.fullmatch(_DURATION, value):
        parts = re.findall(_PART, value)
        sign = -1 if value[0] == "-" else 1
        seconds = sign * sum(float(number) * _UNIT_S[unit] for number, unit in parts) if parts else float(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"must be seconds or a duration such as 5m, not {shown(value)}; below 0 is for ever")
    return inf if seconds < 0 else seconds


KeepAlive = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | Annotated[str, Field(pattern=_DURATION)]),
    Field(description="Seconds, or a duration such as 5m, that a model which comes and goes stays; below 0: for ever."),
]


class OllamaBody(RequestBody):
    """Base of Ollama's bodies. A model's name may end in `:latest`, as clients write it."""

    ignored_keys: ClassVar = keys_ignored_by(OLLAMA)

    def served_name(self) -> str | None:
        """Returns the name that the model is served under."""
        return None if self.model is None else self.model.removesuffix(":latest")


class OllamaEmbedBody(OllamaBody):
    """Options of both routes that embed."""

    options: dict[str, Any] | None = Field(
        None, description="Ollama's: `num_ctx` is the longest input in tokens, others say nothing about embeddings."
    )

    keep_alive: KeepAlive | None = None

    def longest(self, model: ModelInfo) -> int:
        """Returns the limit of tokens of an input: -1 for the limit of the model, or `num_ctx` if that is less."""
        asked = (self.options or {}).get("num_ctx")
        if not isinstance(asked, int) or isinstance(asked, bool) or not 0 < asked < model.max_model_len:
            return -1
        return asked


class OllamaEmbedRequest(OllamaEmbedBody):
    """Body of POST /api/embed."""

    model_config = documented(
        {"model": "all-MiniLM-L6-v2", "input": ["A gate holds the water.", "A pipe carries it."]},
        {"model": "all-MiniLM-L6-v2", "input": "One text is fine too.", "truncate": False},
    )

    own_names: ClassVar = {"truncate_prompt_tokens": "options.num_ctx", "cut_to_fit": "truncate to true"}

    input: TextOrTexts = Field(description="A text or a list of texts.")
    truncate: Flag | None = Field(None, description="Cut over-long texts (default); false refuses them.")
    dimensions: Width | None = Field(None, description="Width of the embeddings (Matryoshka).")

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns the pooling parameters."""
        return PoolingParams(
            truncate_prompt_tokens=self.longest(model),
            refuse_too_long=self.truncate is False,
            dimensions=self.dimensions,
            normalize=True,
        )


class OllamaEmbeddingRequest(OllamaEmbedBody):
    """Body of POST /api/embeddings, which is older."""

    own_names: ClassVar = {"input": "prompt", "truncate_prompt_tokens": "options.num_ctx"}
    model_config = documented({"model": "all-MiniLM-L6-v2", "prompt": "A gate holds the water."})

    prompt: str = Field(description="The text; it is cut to fit.")

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns the pooling parameters: as Ollama, vectors are left at their own length."""
        return PoolingParams(truncate_prompt_tokens=self.longest(model), normalize=False)


class OllamaShowRequest(OllamaBody):
    """Body of POST /api/show and /api/pull."""

    model_config = documented({"model": "all-MiniLM-L6-v2"}, named_by=("model", "name"))

    name: str | None = Field(None, description="Older name of `model`.")
    verbose: Flag | None = Field(None, description="Ollama's; the answer is the same.")
    stream: Flag | None = Field(None, description="Ollama's, of /api/pull; the answer is one line.")
    insecure: Flag | None = Field(None, description="Ollama's, of /api/pull; nothing is fetched.")

    def served_name(self) -> str | None:
        """See OllamaBody. Raises InvalidRequestError where no model is named."""
        name = self.model or self.name
        if not name:
            raise InvalidRequestError("model is missing or empty; name a model that is served.", param="model")
        return name.removesuffix(":latest")


class TextRequest(JsonBody):
    """A request for generated text, which is refused in any form."""

    def check_keys(self) -> None:
        """Lets all keys pass."""

    def life(self) -> dict[str, Any] | None:
        """Returns the body of an OllamaLifeRequest where there is nothing to write about: it is about the model."""
        sent = self.model_extra or {}
        if "model" not in sent or sent.get("prompt") or sent.get("messages"):
            return None
        return {key: sent[key] for key in ("model", "keep_alive") if key in sent}


class OllamaLifeRequest(OllamaBody):
    """Body of POST /api/generate and /api/chat without a text: it loads a model, or lets it go."""

    model_config = documented({"model": "all-MiniLM-L6-v2", "keep_alive": 0})

    keep_alive: KeepAlive | None = None


class OllamaEmbedResponse(BaseModel):
    """Answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="Nanoseconds.")
    load_duration: int = Field(description="Nanoseconds that the request waited for the model; 0: it was loaded.")
    prompt_eval_count: int = Field(description="Tokens of the inputs.")


class OllamaEmbeddingResponse(BaseModel):
    """Answer of POST /api/embeddings."""

    embedding: list[float]


class OllamaDetails(BaseModel):
    """What kind of model it is."""

    parent_model: Literal[""]
    format: Literal["safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of its weights.")
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    """Answer of GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model that is loaded."""

    expires_at: str = Field(description="When it is unloaded if it is not used; the year 2999: never.")
    size_vram: int = Field(description="Bytes on a GPU.")
    context_length: Count


class OllamaRunningModels(BaseModel):
    """Answer of GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(BaseModel):
    """Answer of POST /api/show."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["embedding"]]
    modified_at: str


class OllamaStatus(BaseModel):
    """Answer of POST /api/pull of a model that is served."""

    status: Annotated[str, Field(examples=["success"])]
