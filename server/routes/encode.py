"""The route /v1/encode: dense, sparse and token vectors from one forward."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, Final, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from penstock.engine import ModelInfo, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError, UnsupportedTaskError

from ..calls.engine_inputs import engine_inputs
from ..calls.limits import check_input_limits
from ..calls.model_call import EMBEDDERS, ModelCall
from ..dialects import PENSTOCK, keys_ignored_by
from ..http.vectors import Encoding, check_encodings, lazy_rows, vector_width
from ..response_size import size_beyond_expected, size_of_numbers, size_of_sparse
from ..routing import BatchUse, Router
from ..schemas.chat import InputFields
from ..schemas.encodings import EncodingOptions
from ..schemas.json_schema import body_config
from ..schemas.options import EmbeddingBody, FailFastList, Flag, ListResponse

Output = Literal["dense", "sparse", "multi_vector"]

TASKS: Final[dict[Output, PoolingTask]] = {
    "dense": PoolingTask.EMBED,
    "sparse": PoolingTask.SPARSE_EMBED,
    "multi_vector": PoolingTask.TOKEN_EMBED,
}


def trained_outputs(model: ModelInfo) -> list[Output]:
    """Returns the kinds of vectors for which a model was trained.

    Token vectors of an embedding model that was trained only for dense vectors are not listed.
    """
    heads = model.token_heads
    has_vectors = model.multi_vector is not None or (heads is not None and heads.vectors_file is not None)
    requested: dict[Output, bool] = {
        "dense": PoolingTask.EMBED in model.tasks,
        "sparse": model.sparse is not None,
        "multi_vector": has_vectors,
    }
    return [output for output, is_requested in requested.items() if is_requested]


class EncodeRequest(EncodingOptions, InputFields, EmbeddingBody):
    """Body of POST /v1/encode."""

    model_config = body_config(
        {"input": ["A gate holds the water."]},
        {"input": ["A dam."], "outputs": ["dense", "multi_vector"], "input_type": "document"},
        exactly_one=("input", "messages"),
    )

    ignored_keys: ClassVar = keys_ignored_by(PENSTOCK)
    prompt_fields: ClassVar = (*EmbeddingBody.prompt_fields, "instruction")

    outputs: FailFastList[Output] | None = Field(
        None,
        min_length=1,
        description=(
            "Kinds of vectors to return, computed in one forward. Absent: all kinds for which the model was trained."
        ),
    )
    instruction: str | None = Field(None, description="Replaces the instruction of the model's query prompt.")
    return_token_ids: Flag | None = Field(
        None,
        description=(
            "Also return the token id of each row of `multi_vector`, and for an image in a language model the grid of "
            "its rows (`patches`)."
        ),
    )

    def requested_outputs(self, model: ModelInfo) -> list[Output]:
        """Returns the kinds of vectors to compute, in the order of TASKS: their names form the task label in metrics.

        Raises:
            UnsupportedTaskError: The model does not support one of `outputs`.
            InvalidRequestError: `return_token_ids` is set without the output `multi_vector`.
        """
        if self.outputs is None:
            wanted: list[Output] = trained_outputs(model) or ["dense"]
        else:
            lacking = [output for output in self.outputs if TASKS[output] not in model.tasks]
            if lacking:
                has = [output for output, task in TASKS.items() if task in model.tasks]
                raise UnsupportedTaskError(
                    f"outputs holds {lacking[0]!r}, but {model.name} gives {', '.join(has) or 'no vectors'}.",
                    param="outputs",
                )
            wanted = [output for output in TASKS if output in self.outputs]
        if self.return_token_ids and "multi_vector" not in wanted:
            raise InvalidRequestError(
                "return_token_ids needs multi_vector, which is not in outputs. Add multi_vector to outputs, or leave "
                "return_token_ids out.",
                param="return_token_ids",
            )
        return wanted

    def encoding(self) -> Encoding:
        """Returns the encoding of dense vectors and token vectors.

        Raises:
            InvalidRequestError: The format `bytes` holds one output only, or fields contradict each other.
        """
        encoding = super().encoding()
        if encoding.is_bytes:
            raise InvalidRequestError(
                f"encoding_format is {encoding.format.value!r}, which holds only one output; use 'float' or 'base64'.",
                param="encoding_format",
            )
        return encoding


class SparseRow(BaseModel):
    """A sparse vector. Entries that are not listed are 0."""

    indices: list[int] = Field(description="Token ids, in ascending order.")
    values: list[float]


class Patches(BaseModel):
    """The rows of multi_vector that belong to an image, as a grid that covers the image."""

    rows: int
    columns: int
    vectors: list[int] = Field(
        description="Index of the row of multi_vector for each cell, from left to right, then from top to bottom."
    )


class EncodeRow(BaseModel):
    """The outputs of one input. An output that was not requested is absent."""

    object: Literal["encoding"]
    index: int
    dense: list[float] | list[int] | str | None = None
    sparse: SparseRow | None = None
    multi_vector: list[list[float]] | list[list[int]] | str | None = Field(None, description="One row per token.")
    token_ids: list[int] | None = Field(
        None, description="Token ids of the rows of multi_vector, with return_token_ids only."
    )
    patches: Patches | None = Field(
        None, description="Only with return_token_ids, for an input with one image in a language model."
    )


class EncodeResponse(ListResponse[EncodeRow]):
    """Response of POST /v1/encode, in the order of the inputs."""


router = Router(PENSTOCK, tag="penstock")


@router.task("/v1/encode", batch_use=BatchUse.EMBEDDING, response_model=EncodeResponse)
async def encode(body: EncodeRequest, request: Request) -> Response:
    """Returns dense, sparse and token vectors of each input, computed in one forward."""
    check_input_limits(request, body)
    params = body.pooling_params()
    encoding = body.encoding()
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    check_encodings({"embedding": encoding}, body.num_inputs(), call.info, params, quantization_field="encoding_format")
    options = call.embed_options(body, priority=body.priority)
    wanted = body.requested_outputs(call.info)
    tasks = [TASKS[output] for output in wanted]
    if PoolingTask.EMBED in tasks:
        call.reserve(size_of_numbers(body.num_inputs() * vector_width(call.info, params)))
    if PoolingTask.SPARSE_EMBED in tasks:
        call.reserve(size_of_sparse(body.num_inputs()))
    inputs, options = await engine_inputs(call, body, call.reserve_rows(options))
    result = await call.engine.embed_combined(inputs, tasks, params, options)
    if result.sparse is not None:
        call.reserve(size_beyond_expected(result.sparse))
    num_tokens = call.record_usage("+".join(tasks), result)
    columns: dict[str, list[Any]] = {}
    if result.embeddings is not None:
        columns["dense"] = lazy_rows(result.embeddings, encoding)
    if result.sparse is not None:
        columns["sparse"] = [{"indices": vector.indices, "values": vector.values} for vector in result.sparse]
    if result.vectors is not None:
        columns["multi_vector"] = lazy_rows(result.vectors, encoding)
    if result.token_ids is not None and body.return_token_ids:
        columns["token_ids"] = result.token_ids
        if result.patches is not None:
            columns["patches"] = [None if grid is None else asdict(grid) for grid in result.patches]
    data = [
        {
            "object": "encoding",
            "index": i,
            **{name: column[i] for name, column in columns.items() if column[i] is not None},
        }
        for i in range(len(result.num_tokens))
    ]
    return call.respond({**call.response_fields("encode", num_tokens), "data": data})
