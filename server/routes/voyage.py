"""Voyage's route for texts and images. openai.py and rerank.py have its other routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field

from penstock.engine import PoolingParams, PoolingTask

from ..calls.images import image_usage, read_images
from ..calls.limits import check_num_inputs
from ..calls.model_call import EMBEDDERS, ModelCall
from ..dialects import VOYAGE, keys_ignored_by
from ..http.vectors import BYTES_RESPONSE, check_encodings, vector_width, vectors_response
from ..response_size import size_of_numbers
from ..routing import BatchUse, Router
from ..schemas.encodings import EmbeddingTypeOptions
from ..schemas.inputs import Contents
from ..schemas.json_schema import PIXEL, body_config
from ..schemas.options import PRIORITY, Flag, Priority, RequestBody, Width, truncated
from .openai import EmbeddingRow


class MultimodalRequest(EmbeddingTypeOptions, RequestBody):
    """Body of POST /v1/multimodalembeddings."""

    model_config = body_config(
        {
            "inputs": [
                {"content": [{"type": "text", "text": "A red gate."}]},
                {"content": [{"type": "image_base64", "image_base64": PIXEL}]},
            ],
            "input_type": "document",
        },
        {"inputs": [{"content": [{"type": "text", "text": "What holds the water?"}]}], "output_dtype": "int8"},
    )

    param_names: ClassVar = {"input": "inputs", "dimensions": "output_dimension", "cut_to_fit": "truncation to true"}
    ignored_keys: ClassVar = keys_ignored_by(VOYAGE)
    nested_keys: ClassVar = {"inputs": ("content",)}
    prompt_fields: ClassVar = ("input_type",)

    inputs: Contents = Field(description="Objects of contents: texts, which are joined, or one image.")
    input_type: str | None = Field(
        None, description="Purpose of the texts: query or document. It selects the model's prompt."
    )
    truncation: Flag | None = Field(None, description="False rejects long texts. Absent: they are truncated.")
    output_dimension: Width | None = Field(None, description="Number of dimensions of the embeddings (Matryoshka).")
    priority: Priority | None = PRIORITY

    def pooling_params(self) -> PoolingParams:
        """Returns parameters with the width of the embeddings. Long texts are truncated by default."""
        return truncated(PoolingParams(dimensions=self.output_dimension), self.truncation is not False)


class MultimodalUsage(BaseModel):
    """Voyage's usage."""

    text_tokens: int
    image_pixels: int = Field(description="Width times height of all images.")
    video_pixels: Literal[0]
    total_tokens: int = Field(description="Tokens of texts and images.")


class MultimodalResponse(BaseModel):
    """Response of POST /v1/multimodalembeddings, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    data: list[EmbeddingRow]
    model: str
    usage: MultimodalUsage


router = Router(VOYAGE, tag="openai")


@router.task(
    "/v1/multimodalembeddings",
    batch_use=BatchUse.EMBEDDING,
    response_model=MultimodalResponse,
    responses={200: BYTES_RESPONSE},
)
async def embed_multimodal(body: MultimodalRequest, request: Request) -> Response:
    """Embeds texts and images: one vector per input, in order."""
    check_num_inputs(request, body.inputs, "inputs")
    params = body.pooling_params()
    encodings = body.encodings()
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    check_encodings(encodings, len(body.inputs), call.info, params, quantization_field=body.quantization_field())
    options = call.embed_options(body, priority=body.priority)
    width = vector_width(call.info, params)
    call.reserve(size_of_numbers(len(body.inputs) * width, num_encodings=len(encodings)), param="inputs")
    inputs = await read_images(call, body.inputs, "inputs")
    result = await call.engine.embed(inputs, params, options)
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    images = await image_usage(inputs, result.num_tokens)
    usage: Mapping[str, int] = {
        "text_tokens": num_tokens - images.num_tokens,
        "image_pixels": sum(size.width * size.height for size in images.sizes),
        "video_pixels": 0,
        "total_tokens": num_tokens,
    }
    head = {**call.response_fields("embd", num_tokens), "usage": usage}
    return vectors_response(request, head, result.embeddings, encodings)
