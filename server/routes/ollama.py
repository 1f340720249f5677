"""Ollama: embeddings, the served models, and their loading and unloading.

Requests for generated text are rejected with a message that names the routes of this server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, BeforeValidator, Field

from penstock.engine import ModelInfo, PoolingParams, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError
from penstock.engine.protocol.setting import short_count

from .. import penstock_version
from ..calls.context import ServerContext, context_of
from ..calls.limits import check_num_inputs
from ..calls.model_call import EMBEDDERS, ModelCall
from ..dialects import OLLAMA, OPENAI, keys_ignored_by
from ..errors import quote
from ..http.json_body import JsonBody
from ..http.json_responses import json_response
from ..http.vectors import vector_width
from ..models.model_entry import ModelEntry
from ..models.weight_files import WeightSummary
from ..response_size import size_of_numbers
from ..routing import Access, Router, respond_as
from ..schemas.inputs import parse_text_or_texts
from ..schemas.json_schema import TEXT, Parsed, body_config, one_of
from ..schemas.options import Count, Flag, RequestBody, Width, one_value
from .operations import Version

logger = logging.getLogger(__name__)

_UNIT_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNIT_S)})"
_DURATION: Final = rf"^-?([0-9]+(\.[0-9]+)?|({_PART})+)$"


def _seconds(value: object) -> object:
    """Returns the seconds of a number or of a duration in Go's format, such as "5m". Negative: for ever."""
    seconds = value
    if isinstance(value, str) and re.fullmatch(_DURATION, value):
        parts = re.findall(_PART, value)
        sign = -1 if value[0] == "-" else 1
        seconds = sign * sum(float(number) * _UNIT_S[unit] for number, unit in parts) if parts else float(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"must be seconds or a duration such as 5m, not {quote(value)}; below 0 is for ever")
    return inf if seconds < 0 else seconds


KeepAlive = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | Annotated[str, Field(pattern=_DURATION)]),
    Field(
        description="Seconds, or a duration such as 5m, for which an on-demand model stays loaded. Negative: for ever."
    ),
]


def _parse_input(value: object) -> list[str]:
    """Returns the texts of `input`. Ollama's clients send "" or [] to load or unload a model."""
    return [] if value in ("", []) else parse_text_or_texts(value)


OllamaInput = Annotated[list[str], Parsed(_parse_input, one_of(TEXT, {"type": "array", "items": TEXT}))]


class OllamaBody(RequestBody):
    """Base of Ollama's bodies. A model's name may end in `:latest`, as clients write it."""

    ignored_keys: ClassVar = keys_ignored_by(OLLAMA)

    def served_name(self) -> str | None:
        """Returns the name that the model is served under."""
        return None if self.model is None else self.model.removesuffix(":latest")


class OllamaEmbedBody(OllamaBody):
    """Options of both routes that embed."""

    options: dict[str, Any] | None = Field(
        None,
        description=(
            "Ollama's options. `num_ctx` limits the input length in tokens; other options do not affect embeddings."
        ),
    )

    keep_alive: KeepAlive | None = None

    def token_limit(self, model: ModelInfo) -> int:
        """Returns the limit of tokens of an input: -1 for the limit of the model, or `num_ctx` if that is less."""
        num_ctx = (self.options or {}).get("num_ctx")
        if not isinstance(num_ctx, int) or isinstance(num_ctx, bool) or not 0 < num_ctx < model.max_model_len:
            return -1
        return num_ctx


class OllamaEmbedRequest(OllamaEmbedBody):
    """Body of POST /api/embed."""

    model_config = body_config(
        {"model": "all-MiniLM-L6-v2", "input": ["A gate holds the water.", "A pipe carries it."]},
        {"model": "all-MiniLM-L6-v2", "input": "One text is fine too.", "truncate": False},
        named_by=("model", "input"),
    )

    param_names: ClassVar = {"truncate_prompt_tokens": "options.num_ctx", "cut_to_fit": "truncate to true"}
    nested_keys: ClassVar = {"input": ("text",)}

    input: OllamaInput | None = Field(
        None,
        description=(
            'A text or a list of texts. Absent, "" or []: load the model, or unload it if `keep_alive` is 0. The '
            "list of embeddings is then empty."
        ),
    )
    truncate: Flag | None = Field(
        None, description="Truncate texts that are too long (default). False rejects such texts."
    )
    dimensions: Width | None = Field(None, description="Width of the embeddings (Matryoshka).")

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns parameters that truncate to `options.num_ctx` and normalise, as Ollama does."""
        return PoolingParams(
            truncate_prompt_tokens=self.token_limit(model),
            reject_too_long=self.truncate is False,
            dimensions=self.dimensions,
            normalize=True,
        )


class OllamaEmbeddingRequest(OllamaEmbedBody):
    """Body of POST /api/embeddings, Ollama's older route."""

    param_names: ClassVar = {"input": "prompt", "truncate_prompt_tokens": "options.num_ctx"}
    model_config = body_config(
        {"model": "all-MiniLM-L6-v2", "prompt": "A gate holds the water."}, named_by=("model", "prompt")
    )

    prompt: str | None = Field(
        None,
        description=(
            'The text. It is truncated if it is too long. Absent or "": load the model, or unload it if `keep_alive` '
            "is 0. The embedding is then empty."
        ),
    )

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns the pooling parameters. Like Ollama, this route does not normalise vectors."""
        return PoolingParams(truncate_prompt_tokens=self.token_limit(model), normalize=False)


class OllamaShowRequest(OllamaBody):
    """Body of POST /api/show and /api/pull."""

    model_config = body_config({"model": "all-MiniLM-L6-v2"}, named_by=("model", "name"))

    name: str | None = Field(None, description="Older name for `model`.")
    verbose: Flag | None = Field(None, description="Accepted for Ollama's clients; it does not change the response.")
    stream: Flag | None = Field(None, description="Accepted on /api/pull; the response is always one line.")
    insecure: Flag | None = Field(None, description="Accepted on /api/pull; nothing is downloaded.")

    def served_name(self) -> str | None:
        """Returns the name of the model without `:latest`.

        Raises:
            InvalidRequestError: The body names no model, or two.
        """
        name = one_value({"model": self.model or None, "name": self.name or None})
        if not name:
            raise InvalidRequestError("model is missing or empty; name a model that is served.", param="model")
        return name.removesuffix(":latest")


class TextRequest(JsonBody):
    """A request for generated text. It is always rejected."""

    def check_keys(self, sent: Mapping[str, Any], other_fields: Collection[str] | None) -> list[str]:
        """Accepts all keys."""
        return []

    def load_body(self) -> dict[str, Any] | None:
        """Returns the body of an OllamaLoadRequest if the request has no prompt and no messages."""
        sent = self.model_extra or {}
        if "model" not in sent or sent.get("prompt") or sent.get("messages"):
            return None
        return {key: sent[key] for key in ("model", "keep_alive") if key in sent}


class OllamaLoadRequest(OllamaBody):
    """Body of POST /api/generate and /api/chat without a text. It loads or unloads a model."""

    model_config = body_config({"model": "all-MiniLM-L6-v2", "keep_alive": 0})

    keep_alive: KeepAlive | None = None


class OllamaEmbedResponse(BaseModel):
    """Response of POST /api/embed. Like Ollama's, it has no durations and no count if the request has no text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(0, description="Nanoseconds.")
    load_duration: int = Field(
        0, description="Nanoseconds that the request waited for the model to load; 0 if it was loaded."
    )
    prompt_eval_count: int = Field(0, description="Tokens of the inputs.")


class OllamaEmbeddingResponse(BaseModel):
    """Response of POST /api/embeddings."""

    embedding: list[float]


class OllamaDetails(BaseModel):
    """Format and architecture of a model."""

    parent_model: Literal[""]
    format: Literal["gguf", "safetensors", "pytorch", ""]
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
    """Response of GET /api/tags."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model that is loaded."""

    expires_at: str = Field(
        description="Time at which the model is unloaded if it is not used. A time in the year 2999 means never."
    )
    size_vram: int = Field(description="Bytes on a GPU.")
    context_length: Count


class OllamaRunningModels(BaseModel):
    """Response of GET /api/ps."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(BaseModel):
    """Response of POST /api/show."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["embedding"]]
    modified_at: str


class OllamaStatus(BaseModel):
    """Response of POST /api/pull of a model that is served."""

    status: Annotated[str, Field(examples=["success"])]


router = Router(OLLAMA, tag="ollama")

_LOADED_S: Final = 0.05
"""Seconds. Finding a model that is already loaded takes less."""
_NEVER: Final = "2999-12-31T23:59:59Z"
_NEVER_S: Final = 900 * 365 * 86400.0
"""About the seconds until then. Longer times exceed the range of datetime."""
_LEVELS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}


@router.task("/api/embed", response_model=OllamaEmbedResponse)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Embeds texts, one vector each, L2-normalised. A request without a text loads or unloads a model."""
    if not body.input:
        await _load_or_unload(request, body)
        return json_response({"model": body.model, "embeddings": []})
    check_num_inputs(request, body.input, "input")
    call = await _start(request, body)
    load_s = time.perf_counter() - call.began_s
    params = body.pooling_params(call.info)
    call.reserve(size_of_numbers(len(body.input) * vector_width(call.info, params)))
    options = call.options(call.default_prompt_name)
    result = await call.engine.embed(body.input, params, options)
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    return call.respond(
        {
            "model": body.model or call.info.name,
            "embeddings": result.embeddings,
            "total_duration": round((time.perf_counter() - call.began_s) * 1e9),
            "load_duration": round(load_s * 1e9) if load_s > _LOADED_S else 0,
            "prompt_eval_count": num_tokens,
        }
    )


@router.task("/api/embeddings", response_model=OllamaEmbeddingResponse)
async def embeddings(body: OllamaEmbeddingRequest, request: Request) -> Response:
    """Embeds one text. New clients use /api/embed. A request without a text loads or unloads a model."""
    if not body.prompt:
        await _load_or_unload(request, body)
        return json_response({"embedding": []})
    call = await _start(request, body)
    options = call.options(call.default_prompt_name)
    result = await call.engine.embed([body.prompt], body.pooling_params(call.info), options)
    call.record_usage(PoolingTask.EMBED, result)
    return json_response({"embedding": result.embeddings[0]})


@router.get("/api/tags", access=Access.OPEN, response_model=OllamaModels)
async def tags(request: Request) -> Response:
    """Lists the served names."""
    cards = []
    context = context_of(request)
    for model in context.models.describe_all():
        if model.info is not None:
            files = await _weights(context, model.info)
            cards += [_card(name, model.info, files) for name in model.shown_names]
    return json_response({"models": cards})


@router.get("/api/ps", response_model=OllamaRunningModels)
async def running(request: Request) -> Response:
    """Lists the loaded models, each with the time at which it is unloaded if it is not used."""
    models = []
    context = context_of(request)
    for entry in context.models.entries:
        if (info := entry.info) is None or entry.engine is None:
            continue
        card = _card(entry.name, info, await _weights(context, info))
        size_vram = 0 if info.device == "cpu" else card["size"]
        stays = {"expires_at": _expires_at(entry), "size_vram": size_vram, "context_length": info.max_model_len}
        models.append({**card, **stays})
    return json_response({"models": models})


@router.post("/api/show", response_model=OllamaShowResponse)
async def show(body: OllamaShowRequest, request: Request) -> Response:
    """Describes a model."""
    context = context_of(request)
    described = context.models.describe(body.served_name())
    info = described.require_info()
    name = described.name
    files = await _weights(context, info)
    card = _card(name, info, files)
    figures = {
        "general.architecture": info.model_type,
        "general.parameter_count": files.num_parameters,
        f"{info.model_type}.context_length": info.max_model_len,
        f"{info.model_type}.embedding_length": info.embedding_size,
    }
    return json_response(
        {
            "license": "",
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "template": "",
            "details": card["details"],
            "model_info": figures,
            "capabilities": ["embedding"] if PoolingTask.EMBED in info.tasks else [],
            "modified_at": card["modified_at"],
        }
    )


@router.post("/api/pull", response_model=OllamaStatus)
async def pull(body: OllamaShowRequest, request: Request) -> Response:
    """Succeeds for a served model. It downloads nothing: models are chosen when the server starts."""
    context_of(request).models.describe(body.served_name())
    return json_response({"status": "success"})


@router.get("/api/version", access=Access.OPEN, response_model=Version)
async def version() -> Response:
    """Returns the version of penstock."""
    return json_response({"version": penstock_version()})


@router.post("/api/generate", aliases=["/api/chat"], include_in_schema=False)
@router.post("/v1/chat/completions", aliases=["/v1/completions"], dialect=OPENAI, include_in_schema=False)
async def generate(body: TextRequest, request: Request) -> Response:
    """Rejects requests for generated text. A request without a prompt loads or unloads a model."""
    sent = body.load_body() if request.scope["path"].startswith("/api/") else None
    if sent is not None:
        return await respond_as(load_or_unload, OllamaLoadRequest, sent, request)
    served = "; ".join(
        name if info is None else f"{name} ({', '.join(info.tasks)})"
        for _, name, info, _ in context_of(request).models.describe_all()
    )
    raise UnsupportedTaskError(
        f"This server embeds, scores and classifies texts and writes none. It has {served}: send texts to "
        "/v1/embeddings, /api/embed, /rerank, /score or /classify.",
        param="model",
    )


async def load_or_unload(body: OllamaLoadRequest, request: Request) -> Response:
    """Responds to a request without a text; see `_load_or_unload`."""
    name = await _load_or_unload(request, body)
    reason = "unload" if body.keep_alive == 0 else "load"
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json_response({"model": name, "created_at": now, "response": "", "done": True, "done_reason": reason})


async def _load_or_unload(request: Request, body: OllamaEmbedBody | OllamaLoadRequest) -> str:
    """Loads an on-demand model. If `keep_alive` is 0, unloads it instead, after its requests or its load.

    Returns:
        The name of the model.

    Raises:
        InvalidRequestError: The body names no model, or `keep_alive` is 0 and the model always stays loaded.
    """
    name = body.served_name()
    if not name:
        raise InvalidRequestError(
            "The request has neither a text nor a model. Send a text, or name the model to load or unload.",
            param="model",
        )
    if body.keep_alive != 0:
        await _start(request, body)
        return name
    models = context_of(request).models
    if not models.entry(name).model.is_on_demand:
        raise InvalidRequestError(
            f"keep_alive is 0, but {quote(name)} always stays loaded. Only models with `ttl` or `preload = "
            "false` in the file of --config can be unloaded by clients.",
            param="keep_alive",
        )
    models.set_ttl(name, 0.0)
    return name


async def _start(request: Request, body: OllamaEmbedBody | OllamaLoadRequest) -> ModelCall:
    """Starts a call. Its model then stays loaded for the request's `keep_alive`."""
    call = await ModelCall.start(request, body.served_name(), EMBEDDERS)
    if body.keep_alive is not None:
        call.context.models.set_ttl(call.name, body.keep_alive)
    return call


async def _weights(context: ServerContext, info: ModelInfo) -> WeightSummary:
    """Returns the weight files of a model, or an empty summary if its folder cannot be read."""
    try:
        return await asyncio.to_thread(WeightSummary.of, info.path, context.weight_headers)
    except OSError as error:
        logger.warning("the weights of %s cannot be described: %s", info.name, error)
        return WeightSummary(num_bytes=0, num_parameters=0, modified_s=0.0, format="")


def _expires_at(entry: ModelEntry) -> str:
    """Returns the time at which a model is unloaded if no further request comes."""
    if entry.ttl_s >= _NEVER_S:
        return _NEVER
    since_s = 0.0 if entry.num_requests else time.monotonic() - entry.last_used_s
    return (datetime.now(UTC) + timedelta(seconds=entry.ttl_s - since_s)).isoformat().replace("+00:00", "Z")


def _card(name: str, info: ModelInfo, files: WeightSummary) -> dict[str, Any]:
    modified = datetime.fromtimestamp(files.modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    details = {
        "parent_model": "",
        "format": files.format,
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": short_count(files.num_parameters),
        "quantization_level": _LEVELS.get(info.dtype, info.dtype.upper()),
    }
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": files.num_bytes,
        "digest": _digest(info),
        "details": details,
    }


def _digest(info: ModelInfo) -> str:
    """Returns the SHA-256 of the model's name and configuration, in hexadecimal."""
    config = orjson.dumps([info.name, info.config], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str)
    return hashlib.sha256(config).hexdigest()
