"""Embedding routes for OpenAI, Jina, Voyage and vLLM clients: one vector for each text or for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from penstock.engine import PoolingParams, PoolingTask, RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError

from ..calls.engine_inputs import engine_inputs
from ..calls.limits import check_input_limits
from ..calls.model_call import EMBEDDERS, ModelCall
from ..dialects import INFINITY, JINA, OPENAI, SGLANG, VLLM, VOYAGE, keys_ignored_by
from ..http.vectors import BYTES_RESPONSE, Encoding, check_encodings, vector_width, vectors_response
from ..response_size import size_of_numbers
from ..routing import BatchUse, Router
from ..schemas.chat import InputFields
from ..schemas.encodings import EmbeddingTypeOptions
from ..schemas.images import has_images
from ..schemas.json_schema import PIXEL, body_config
from ..schemas.options import (
    EmbeddingBody,
    Flag,
    ListResponse,
    Truncate,
    Width,
    WidthOrZero,
    contradiction,
    one_value,
    truncated,
)

_PLAIN_PARAMS: Final = PoolingParams()
_PARAM_FIELDS: Final = frozenset(
    (
        "dimensions",
        "normalize",
        "normalized",
        "output_dimension",
        "truncate",
        "truncate_prompt_tokens",
        "truncation",
        "truncation_side",
        "use_activation",
    )
)
"""Fields that `pooling_params` reads. Most bodies set none of these."""


class EmbeddingRequest(EmbeddingTypeOptions, InputFields, EmbeddingBody):
    """Body of POST /v1/embeddings."""

    model_config = body_config(
        {"model": "all-MiniLM-L6-v2", "input": ["A gate holds the water.", "A pipe carries it."]},
        {"input": "One text is fine too.", "encoding_format": "base64"},
        {"input": [101, 7592, 2088, 102]},
        {"input": [{"text": "A dam."}], "task": "retrieval.passage", "embedding_type": "ubinary"},
        {"input": [{"text": "A red gate."}, {"image": PIXEL}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]},
        {"input": ["A dam."], "input_type": "document", "output_dtype": "int8", "truncation": True},
        exactly_one=("input", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(OPENAI, JINA, VOYAGE, VLLM, INFINITY, SGLANG)
    prompt_fields: ClassVar = (*EmbeddingBody.prompt_fields, "task", "instruction")

    dimensions: WidthOrZero | None = Field(
        None,
        description=(
            "Number of dimensions of the embeddings (Matryoshka). 0 is accepted only together with `modality`: "
            "Infinity's client sends both by default."
        ),
    )
    modality: Literal["text", "image"] | None = Field(
        None, description="Field of Infinity's client. With `image`, the texts of `input` are data URIs or https URLs."
    )
    output_dimension: Width | None = Field(None, description="Voyage's name for `dimensions`.")
    normalized: Flag | None = Field(None, description="Jina's name for `normalize`.")
    truncate: Truncate | None = Field(
        None,
        description="Truncate long inputs: true, false, 'NONE', 'START' (cuts the start) or 'END' (cuts the end).",
    )
    truncation: Flag | None = Field(None, description="Voyage's name for `truncate`.")
    prefix: str | None = Field(
        None, description="Text put before every input instead of the model's prompt. Open WebUI sends it."
    )
    task: str | None = Field(
        None,
        description=(
            "Jina's name for `input_type`, such as `retrieval.query`. Selects the LoRA adapter of models that have one "
            "for each task."
        ),
    )
    lora_path: str | None = Field(
        None, description="Field of SGLang: name of a LoRA adapter, the same as `model:adapter` in `model`."
    )
    instruction: str | None = Field(
        None,
        description="Replaces the instruction in the query prompt of models with a prompt of the form `Instruct: ...`.",
    )
    late_chunking: Flag | None = Field(
        None,
        description=(
            "Concatenate all inputs in their order, without separators, and run them as one text. The vector of an "
            "input is the mean of its own token vectors, so it depends on the whole text. Only for models with MEAN "
            "pooling. The joined text must fit the model's maximum length, or truncate_prompt_tokens truncates it as "
            "a whole. The prompt is put once before the first input. Rejected with token vectors."
        ),
    )

    return_multivector: Flag | None = Field(
        None, description="Field of Jina: return one vector per token, in `embeddings` instead of `embedding`."
    )

    def check_input_fields(self) -> None:
        """Raises InvalidRequestError without input, or for late_chunking with messages or images."""
        super().check_input_fields()
        if self.late_chunking and has_images(self.input or ()):
            raise InvalidRequestError(
                "late_chunking joins the parts of one text, but input has images. Leave late_chunking out.",
                param="late_chunking",
            )
        if self.late_chunking and self.messages is not None:
            raise InvalidRequestError(
                "late_chunking joins the parts of one text; send them as input, or leave late_chunking out.",
                param="late_chunking",
            )

    def served_name(self) -> str | None:
        """Returns the name of the model, or of its adapter as `model:adapter`."""
        model = self.model or ""
        return self.model if not self.lora_path or model.endswith(f":{self.lora_path}") else f"{model}:{self.lora_path}"

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters.

        Raises:
            InvalidRequestError: `dimensions` is 0, or two names of an option have different values.
        """
        if _PARAM_FIELDS.isdisjoint(self.model_fields_set):
            return _PLAIN_PARAMS
        if self.dimensions == 0 and self.modality is None:
            raise InvalidRequestError("dimensions must be at least 1, not 0.", param="dimensions")
        params = PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            dimensions=one_value({"dimensions": self.dimensions or None, "output_dimension": self.output_dimension}),
            normalize=one_value({"normalize": self.normalize, "normalized": self.normalized}),
            use_activation=self.use_activation,
        )
        truncate = self.truncation if self.truncate is None else self.truncate
        if self.truncation is not None and self.truncation is not (truncate is not False):
            raise contradiction("truncate", truncate, "truncation", self.truncation)
        name = "truncation" if self.truncate is None else "truncate"
        return params if truncate is None else truncated(params, truncate, name)

    def field_names(self) -> Mapping[str, str]:
        """Maps the options to the names that the request uses."""
        names = dict(super().field_names())
        if not self.dimensions and self.output_dimension is not None:
            names["dimensions"] = "output_dimension"
        if self.normalize is None and self.normalized is not None:
            names["normalize"] = "normalized"
        return names


class EmbeddingRow(BaseModel):
    """One embedding, in the order of the inputs."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str | dict[str, list[float] | list[int] | str] = Field(
        description=(
            "List of numbers or base64 text. An object with one entry per type if embedding_type is a list of types."
        )
    )


TokenVectors = list[list[float]] | list[list[int]] | str


class MultiVectorRow(BaseModel):
    """The vectors of one input, in the order of its tokens."""

    object: Literal["embeddings"]
    index: int
    embeddings: TokenVectors | dict[str, TokenVectors] = Field(
        description=(
            "One row per token, or all rows as base64. An object with one entry per type if several types are "
            "requested."
        )
    )


class MultiVectorResponse(ListResponse[MultiVectorRow]):
    """Response of POST /v1/multi-vector."""


class EmbeddingResponse(ListResponse[EmbeddingRow]):
    """Response of POST /v1/embeddings."""


router = Router(OPENAI, tag="openai")


@router.task(
    "/v1/embeddings",
    aliases=["/embeddings"],
    batch_use=BatchUse.EMBEDDING,
    response_model=EmbeddingResponse | MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids: one vector per input, in order. `return_multivector` gives one vector per token."""
    if body.return_multivector:
        return await create_multi_vectors(body, request)
    check_input_limits(request, body)
    params = body.pooling_params()
    call = await ModelCall.start(request, body.served_name(), EMBEDDERS)
    encodings, options = _encodings_and_options(call, body, params)
    width = vector_width(call.info, params)
    call.reserve(size_of_numbers(body.num_inputs() * width, num_encodings=len(encodings)))
    inputs, options = await engine_inputs(call, body, options)
    embed = call.engine.embed_late if body.late_chunking else call.engine.embed
    result = await embed(inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    return vectors_response(request, call.response_fields("embd", num_tokens), result.embeddings, encodings)


@router.task(
    "/v1/multi-vector",
    batch_use=BatchUse.EMBEDDING,
    response_model=MultiVectorResponse,
    responses={200: BYTES_RESPONSE},
    tags=["jina"],
)
async def create_multi_vectors(body: EmbeddingRequest, request: Request) -> Response:
    """Embeds texts or token ids, one vector per token.

    `input_type` states whether the inputs are queries or documents, for models that treat them differently (ColBERT).
    The default is documents.
    """
    check_input_limits(request, body)
    if body.late_chunking:
        raise InvalidRequestError(
            "late_chunking returns one vector per input, this request one per token. Leave late_chunking out.",
            param="late_chunking",
        )
    params = body.pooling_params()
    call = await ModelCall.start(request, body.served_name(), EMBEDDERS)
    encodings, options = _encodings_and_options(call, body, params)
    options = call.reserve_rows(options, num_encodings=len(encodings))
    inputs, options = await engine_inputs(call, body, options)
    result = await call.engine.token_embed(inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.TOKEN_EMBED, result)
    return vectors_response(
        request, call.response_fields("embd", num_tokens), result.rows, encodings, name="embeddings"
    )


def _encodings_and_options(
    call: ModelCall, body: EmbeddingRequest, params: PoolingParams
) -> tuple[Mapping[str, Encoding], RequestOptions]:
    """Returns the response encodings and the engine options, after checking them against the model."""
    encodings = body.encodings()
    check_encodings(encodings, body.num_inputs(), call.info, params, quantization_field=body.quantization_field())
    options = call.embed_options(body, priority=body.priority)
    prompt = body.prefix  # Open WebUI's field `prefix` is the prompt of every input
    if prompt is not None:
        options = replace(options, prompt=prompt)
    return encodings, options
