"""What is known of a file and of a batch: the records that the database keeps and that answers are made of."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.engine.protocol.errors import ConflictError


class Status(StrEnum):
    """Where a batch stands. The last four are ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDS: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, whose body lies in the data folder under its id.

    Attributes:
        id: Its name.
        owner: Whose it is: the identity of an API key, "" where the server has none.
        filename: What its client calls it.
        purpose: "batch" or "batch_output".
        num_bytes: Its size.
        created_at: Unix time.
        expires_at: Unix time from which on it is gone; None: it stays.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        """Returns it as clients of OpenAI read it."""
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
    """What is wrong with an input file.

    Attributes:
        code: A word for programs.
        message: Words for people.
        param: The key of the line at fault.
        line: Number of the line, from 1; None: of the whole file.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Batch(msgspec.Struct, kw_only=True):
    """A batch. The one that runs it changes it, and has it stored before anybody may rely on the change.

    Attributes:
        id: Its name.
        owner: Whose it is; see StoredFile.
        endpoint: The route of all its lines.
        input_file_id: The file of its lines.
        output_id: Name of the file of answers, which grows while it runs.
        error_id: Name of the file of errors.
        completion_window: What its client asked for, such as "24h".
        metadata: Notes of its client.
        output_expires_s: Seconds after which the files that it makes are gone.
        status: Where it stands.
        created_at: Unix time; so are the others whose names end in `_at`.
        errors: Why it failed.
        model: Served name that answered the first line.
        num_lines: Requests in it, once it is validated.
        num_completed: Those answered.
        num_failed: Those with an error.
        num_tokens: Of the inputs of answers.
        num_output_bytes: Of the answers that count.
        num_error_bytes: Of the errors that count.
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
    status: Status = Status.VALIDATING
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

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status in ENDS

    @property
    def ended_at(self) -> int | None:
        """Unix time of its end; None while it has not ended."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    @property
    def num_done(self) -> int:
        """Lines with an answer or an error."""
        return self.num_completed + self.num_failed

    @property
    def written(self) -> tuple[tuple[str, str, int], ...]:
        """Name, id and bytes that count of each file that it writes."""
        return ("output", self.output_id, self.num_output_bytes), ("error", self.error_id, self.num_error_bytes)

    def become(self, status: Status, now: int) -> None:
        """Changes its status, and notes when."""
        self.status = status
        setattr(self, f"{status}_at", now)

    def shown(self) -> dict[str, Any]:
        """Returns it as clients of OpenAI read it."""
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


def ended(batch: Batch) -> ConflictError:
    """Returns the error of a batch that cannot be cancelled any more."""
    return ConflictError(f"The batch is {batch.status}; it cannot be cancelled any more.", param="batch_id")


def new_file_id() -> str:
    """Returns a name for a file that nobody can guess."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Returns a name for a batch that nobody can guess."""
    return f"batch_{secrets.token_hex(12)}"
