"""Cohere's embed v1 and v2, tokenize and detokenize. rerank.py and classify.py have its other routes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import numpy as np
from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from penstock.engine import ModelInfo, PoolingParams, PoolingTask
from penstock.engine.protocol.errors import InvalidRequestError

from ..calls.images import ImageSize, image_usage, read_images
from ..calls.limits import check_num_chars, check_num_inputs, check_num_named_tokens, check_num_tokens
from ..calls.model_call import EMBEDDERS, FEWER_IDS, ModelCall
from ..dialects import COHERE, keys_ignored_by
from ..errors import COHERE_TAG
from ..http.quantization import check_width, quantize
from ..http.vectors import base64_row, vector_width
from ..request_state import state_of
from ..response_size import size_of_numbers, size_of_texts, size_of_tokens
from ..routing import BatchUse, Router
from ..schemas.encodings import QUANTIZATIONS, EmbeddingType, EmbeddingTypes
from ..schemas.images import Image
from ..schemas.inputs import Contents, Images, SomeTokenIds, Texts
from ..schemas.json_schema import body_config
from ..schemas.options import PRIORITY, CohereTruncate, Count, Priority, RequestBody, VersionMeta, Width

_ENDPOINTS: Final = {
    "embed": (PoolingTask.EMBED,),
    "rerank": (PoolingTask.SCORE,),
    "classify": (PoolingTask.CLASSIFY, PoolingTask.EMBED),  # by the classes of the model, or by examples
}


def cohere_endpoints(model: ModelInfo) -> list[str]:
    """Returns Cohere's names of the endpoints that the model supports."""
    return [name for name, tasks in _ENDPOINTS.items() if any(task in model.tasks for task in tasks)]


class CohereBody(RequestBody):
    """Base of the bodies that only Cohere uses."""

    tag: ClassVar[str] = COHERE_TAG
    ignored_keys: ClassVar = keys_ignored_by(COHERE)


class CohereEmbedRequest(CohereBody):
    """Body of POST /v1/embed and /v2/embed."""

    model_config = body_config(
        {"texts": ["A gate holds the water."], "input_type": "search_document", "embedding_types": ["float"]},
        {"texts": ["What holds the water?"], "input_type": "search_query", "embedding_types": ["int8"]},
        exactly_one=("texts", "inputs", "images"),
    )

    nested_keys: ClassVar = {"texts": ("text",), "inputs": ("content",)}
    prompt_fields: ClassVar = ("input_type",)

    texts: Texts | None = Field(None, description="Texts.")
    inputs: Contents | None = Field(
        None,
        description="Texts and images as objects of contents, instead of `texts`. An object has texts or an image.",
    )
    images: Images | None = Field(None, description="Images as data URIs, instead of `texts`.")
    input_type: str | None = Field(
        None,
        description="Purpose of the texts, such as search_query or search_document. It selects the model's prompt.",
    )
    embedding_types: EmbeddingTypes | None = Field(
        None, description="Number formats to return, all from one forward. Absent: float; v1 then returns plain lists."
    )
    output_dimension: Width | None = Field(None, description="Width of the embeddings (Matryoshka).")
    truncate: CohereTruncate | None = Field(
        None,
        description=(
            "Side at which texts that are too long are truncated: END (default) or START. NONE rejects such texts."
        ),
    )
    max_tokens: Count | None = Field(
        None,
        description="Maximum tokens per text, with special tokens and prompt. 0 or absent: the limit of the model.",
    )
    priority: Priority | None = PRIORITY

    def field_names(self) -> Mapping[str, str]:
        """Maps the names of the engine in errors to those of Cohere."""
        return {
            "input": self.input_field(),
            "dimensions": "output_dimension",
            "truncate_prompt_tokens": "max_tokens",
            "cut_to_fit": "truncate to START or END",
        }

    def input_field(self) -> str:
        """Returns the field that holds the inputs."""
        return next((name for name in ("texts", "inputs", "images") if getattr(self, name)), "texts")

    def contents(self) -> list[str | Image]:
        """Returns the texts and images to embed.

        Raises:
            InvalidRequestError: The body has not exactly one of `texts`, `inputs` and `images`.
        """
        given = [name for name in ("texts", "inputs", "images") if getattr(self, name)]
        if len(given) != 1:
            has = f"both {' and '.join(given)}" if given else "neither"
            raise InvalidRequestError(f"Give one of texts, inputs and images; the body has {has}.", param="texts")
        return [*getattr(self, given[0])]

    def pooling_params(self, model: ModelInfo) -> PoolingParams:
        """Returns the pooling parameters. As with Cohere, texts are truncated unless `truncate` is NONE."""
        longest = (model.max_embed_len or sys.maxsize) if model.enable_chunked_processing else model.max_model_len
        return PoolingParams(
            dimensions=self.output_dimension,
            truncate_prompt_tokens=self.max_tokens if self.max_tokens and self.max_tokens < longest else -1,
            reject_too_long=self.truncate is CohereTruncate.NONE,
            truncation_side="left" if self.truncate is CohereTruncate.START else "right",
        )


class InputTokens(BaseModel):
    """Cohere's billed units: tokens after truncation, with special tokens."""

    input_tokens: int
    image_tokens: int = Field(description="Tokens of images: their patches, and the class embedding of some models.")
    images: int | None = Field(None, description="Number of images; absent if there are none.")


class CohereEmbedMeta(VersionMeta):
    """Cohere's meta object."""

    billed_units: InputTokens


class CohereImage(BaseModel):
    """Properties of an image."""

    width: int
    height: int
    format: str
    bit_depth: int = Field(description="24: the model reads 8 bits of red, green and blue.")


class EmbeddingsByType(BaseModel):
    """One list per requested type, each with one entry per text."""

    float_: list[list[float]] | None = Field(None, alias="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = Field(None, description="One bit per dimension, packed into signed bytes.")
    ubinary: list[list[int]] | None = Field(None, description="One bit per dimension, packed into unsigned bytes.")
    base64: list[str] | None = Field(None, description="Base64 of little-endian float32.")


class _EmbedResponse(BaseModel):
    id: str
    texts: list[str]
    images: list[CohereImage] | None = Field(None, description="Size and format of each image; absent without images.")
    meta: CohereEmbedMeta


class CohereEmbedByTypeResponse(_EmbedResponse):
    """Response of POST /v2/embed, and of /v1/embed with `embedding_types`."""

    response_type: Literal["embeddings_by_type"]
    embeddings: EmbeddingsByType


class CohereEmbedFloatsResponse(_EmbedResponse):
    """Response of POST /v1/embed without `embedding_types`."""

    response_type: Literal["embeddings_floats"]
    embeddings: list[list[float]]


class CohereTokenizeRequest(CohereBody):
    """Body of POST /v1/tokenize."""

    model_config = body_config({"text": "A gate holds the water."})

    text: str = Field(description="The text.")


class CohereDetokenizeRequest(CohereBody):
    """Body of POST /v1/detokenize."""

    param_names: ClassVar = {"input": "tokens"}
    model_config = body_config({"tokens": [7592, 2088]})

    tokens: SomeTokenIds = Field(description="Token ids of the served model.")


class CohereTokenizeResponse(BaseModel):
    """Response of POST /v1/tokenize: the tokens of the text, without special tokens."""

    tokens: list[int]
    token_strings: list[str]
    meta: VersionMeta


class CohereDetokenizeResponse(BaseModel):
    """Response of POST /v1/detokenize."""

    text: str
    meta: VersionMeta


router = Router(COHERE, tag="cohere")


@router.task("/v2/embed", batch_use=BatchUse.EMBEDDING, response_model=CohereEmbedByTypeResponse)
async def embed_v2(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeds texts or images: one vector for each, in each requested type."""
    return await embed(body, request, version="2")


@router.task(
    "/v1/embed",
    batch_use=BatchUse.EMBEDDING,
    response_model=CohereEmbedFloatsResponse | CohereEmbedByTypeResponse,
)
async def embed_v1(body: CohereEmbedRequest, request: Request) -> Response:
    """Embeds texts or images: one vector for each, as plain lists, or in each type of `embedding_types`."""
    return await embed(body, request, version="1")


async def embed(body: CohereEmbedRequest, request: Request, *, version: str) -> Response:
    """Runs an embed request of a `version` of Cohere's API. Responses of version "1" may have no types."""
    contents = body.contents()
    param = body.input_field()
    check_num_inputs(request, contents, param)
    texts = [content for content in contents if isinstance(content, str)]
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    params = body.pooling_params(call.info)
    width = vector_width(call.info, params)
    _check_widths(body, width)
    options = call.embed_options(body, priority=body.priority)
    is_by_type = version != "1" or bool(body.embedding_types)
    types: list[EmbeddingType] = body.embedding_types or ["float"]
    vectors = size_of_numbers(len(contents) * width, num_encodings=len(types))
    call.reserve(vectors.plus(size_of_texts(texts)), param=param)
    inputs = await read_images(call, contents, param)
    result = await call.engine.embed(inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    images = await image_usage(inputs, result.num_tokens)
    rows = np.ascontiguousarray(result.embeddings)
    return call.respond(
        {
            "response_type": "embeddings_by_type" if is_by_type else "embeddings_floats",
            "id": f"embed-{state_of(request.scope).request_id}",
            "embeddings": {kind: _encoded(rows, kind) for kind in types} if is_by_type else rows,
            "texts": texts,
            **({"images": [_image(size) for size in images.sizes]} if images.sizes else {}),
            "meta": {
                "api_version": {"version": version},
                "billed_units": {
                    "input_tokens": num_tokens - images.num_tokens,
                    "image_tokens": images.num_tokens,
                    **({"images": len(images.sizes)} if images.sizes else {}),
                },
                **call.truncation_warnings(),
            },
        },
    )


@router.post("/v1/tokenize", response_model=CohereTokenizeResponse)
async def tokenize(body: CohereTokenizeRequest, request: Request) -> Response:
    """Returns the tokens of a text, without special tokens."""
    check_num_chars(len(body.text), "text")
    call = await ModelCall.start(request, body.model)
    (token_ids,) = await call.engine.tokenize(
        [body.text], add_special_tokens=False, on_count=lambda num_tokens: check_num_tokens(num_tokens, "text")
    )
    call.reserve(size_of_tokens(len(token_ids)), param="text")
    known = sorted(set(token_ids))
    words = await call.engine.detokenize([[token_id] for token_id in known], skip_special_tokens=False)
    texts = dict(zip(known, words, strict=True))
    strings = (texts[token_id] for token_id in token_ids)
    content = {"tokens": token_ids, "token_strings": strings, "meta": _version_meta()}
    return call.respond(content)


@router.post("/v1/detokenize", response_model=CohereDetokenizeResponse)
async def detokenize(body: CohereDetokenizeRequest, request: Request) -> Response:
    """Returns the text of token ids."""
    check_num_named_tokens(len(body.tokens), "tokens")
    call = await ModelCall.start(request, body.model)
    (text,) = await call.engine.detokenize([body.tokens])
    call.reserve(size_of_texts([text]), param="tokens", remedy=FEWER_IDS)
    return call.respond({"text": text, "meta": _version_meta()})


def _check_widths(body: CohereEmbedRequest, width: int) -> None:
    """Raises InvalidRequestError if a width cannot be packed into bytes."""
    for kind in body.embedding_types or ():
        if kind in QUANTIZATIONS:
            check_width(width, QUANTIZATIONS[kind], param="embedding_types")


def _encoded(rows: NDArray[np.float32], kind: EmbeddingType) -> NDArray[Any] | list[str]:
    if kind == "float":
        return rows
    if kind == "base64":
        return [base64_row(row) for row in np.ascontiguousarray(rows, "<f4")]
    return quantize(rows, QUANTIZATIONS[kind], param="embedding_types")


def _image(size: ImageSize) -> dict[str, Any]:
    return {"width": size.width, "height": size.height, "format": size.format.lower(), "bit_depth": 24}


def _version_meta() -> dict[str, Any]:
    return {"api_version": {"version": "1"}}
