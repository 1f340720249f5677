"""Bodies of OpenAI's routes for files and batches."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints

from ..errors import quote
from ..http.json_body import JsonBody
from .json_schema import body_config
from .options import Count

MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 30 * 24 * 3600
"""Also the default for files."""
MAX_HOURS: Final = 168
_HOURS: Final = r"^[1-9][0-9]{0,2}h$"

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]


class ExpiresAfter(BaseModel):
    """When a file expires."""

    anchor: Literal["created_at"] = Field(description="Start of the period: the creation of the file.")
    seconds: Annotated[Count, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


def _hours(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(_HOURS, value) is None:
        raise ValueError(f"must be 1h to {MAX_HOURS}h, such as 24h, not {quote(value)}")
    return value


CompletionWindow = Annotated[str, StringConstraints(pattern=_HOURS), BeforeValidator(_hours)]


class BatchRequest(JsonBody):
    """Body of POST /v1/batches."""

    model_config = body_config(
        {"input_file_id": "file-0123456789abcdef01234567", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    )

    input_file_id: str = Field(description="An uploaded file of JSON lines.")
    endpoint: str = Field(description="The route of all lines.")
    completion_window: CompletionWindow = Field(
        description=f"Hours after which the batch expires, from 1h to {MAX_HOURS}h. OpenAI's clients send 24h."
    )
    metadata: Metadata | None = Field(None, description="Notes of the client. Responses return them.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the output files expire. Absent: after 30 days."
    )


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileDeleted(BaseModel):
    """Response of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class ObjectList(BaseModel):
    """The fields of a list page, without its entries."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(ObjectList):
    """Files."""

    data: list[FileObject]


class BatchError(BaseModel):
    """An error in an input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Number of lines of a batch: all, completed and failed."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(ObjectList):
    """Batches."""

    data: list[BatchObject]


UPLOAD_SCHEMA: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "contentMediaType": "application/octet-stream",
                            "description": "JSON lines: custom_id, method, url and body each.",
                        },
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_EXPIRY_S,
                            "maximum": MAX_EXPIRY_S,
                            "description": "Seconds after which the file expires. Absent: 30 days.",
                        },
                    },
                }
            }
        },
    }
}
"""OpenAPI schema of an upload form. FastAPI does not parse the form: it is streamed to disk."""
