"""Files and batches: their records in the database."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.engine.protocol.errors import ConflictError

CHECK_LINE: Final = 0
"""Number of the check of the input file among the lines that run alone."""


class BatchStatus(StrEnum):
    """Status of a batch. The last four are final."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


TERMINAL_STATUSES: Final = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. Its content is in the data folder under its id.

    Attributes:
        owner: Identity of the API key; "" if the server has no keys.
        filename: Name given by the client.
        purpose: "batch" or "batch_output".
        created_at: Unix time.
        expires_at: Unix time of expiry; None: no expiry.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None

    def to_openai(self) -> dict[str, Any]:
        """Returns the record in OpenAI's format."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineError(msgspec.Struct, frozen=True):
    """An error of a batch or of a line.

    Attributes:
        param: The key at fault.
        line: Line number, from 1; None: the whole file.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch. Its BatchRun changes it and stores each change.

    Attributes:
        owner: Identity of the API key; "" if the server has no keys.
        endpoint: The route of all its lines.
        input_file_id: Id of the uploaded file with the request lines.
        output_id: The output file, which grows while the batch runs.
        error_id: Id of the file with the failed lines.
        completion_window: As requested, such as "24h".
        metadata: Notes of the client.
        output_expires_s: Seconds after which its output files expire.
        created_at: Unix time, as in all attributes that end in `_at`.
        errors: Reasons of a failure.
        model: Served name of the model that ran the first line.
        num_lines: Requests in the input file, after validation.
        num_completed: Requests with a response.
        num_failed: Requests with an error.
        num_tokens: Tokens of the inputs of completed requests.
        num_output_bytes: Recorded length of the output file.
        num_error_bytes: Recorded length of the error file.
        last_started: Lines up to this number may have started since the last clean stop of the server.
        lone_line: Number of the line that runs alone now, or CHECK_LINE.
        num_crashes: Line number to the number of kills of the server while it ran alone.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    output_id: str
    error_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_s: int
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: list[LineError] = []
    model: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_output_bytes: int = 0
    num_error_bytes: int = 0
    last_started: int = 0
    lone_line: int | None = None
    num_crashes: dict[int, int] = {}

    @property
    def has_ended(self) -> bool:
        """Whether the status is final."""
        return self.status in TERMINAL_STATUSES

    @property
    def ended_at(self) -> int | None:
        """Unix time of its end; None before the end."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    @property
    def num_done(self) -> int:
        """Lines with a response or an error."""
        return self.num_completed + self.num_failed

    @property
    def output_files(self) -> tuple[tuple[str, str, int], ...]:
        """Name, id and recorded length of each file that the batch writes."""
        return ("output", self.output_id, self.num_output_bytes), ("error", self.error_id, self.num_error_bytes)

    def set_status(self, status: BatchStatus, now: int) -> None:
        """Changes the status and records the time."""
        self.status = status
        setattr(self, f"{status}_at", now)

    def to_openai(self) -> dict[str, Any]:
        """Returns the record in OpenAI's format."""
        files = {
            "output_file_id": self.output_id if self.has_ended and self.num_output_bytes else None,
            "error_file_id": self.error_id if self.has_ended and self.num_error_bytes else None,
        }
        times = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_at")}
        errors = {"object": "list", "data": [msgspec.to_builtins(error) for error in self.errors]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            **files,
            **times,
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": {
                "input_tokens": self.num_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.num_tokens,
            },
            "metadata": self.metadata,
        }


def already_ended_error(batch: BatchRecord) -> ConflictError:
    """Returns the error for cancelling an ended batch."""
    return ConflictError(f"The batch is {batch.status}; it cannot be cancelled any more.", param="batch_id")


def new_file_id() -> str:
    """Returns `file-` and 24 random hexadecimal digits: a file id cannot be guessed."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Returns `batch_` and 24 random hexadecimal digits."""
    return f"batch_{secrets.token_hex(12)}"
