"""One log line per request: what was asked for, the answer's status, and where the time went. Never what was sent."""

from __future__ import annotations

import logging
from typing import Any, Final

from .timing import RequestRecord

logger = logging.getLogger("penstock.access")

_MAX_PATH_CHARS: Final = 200


def log_access(record: RequestRecord) -> None:
    """Logs a request unless it is a probe. The fields stand beside the message where log lines are JSON."""
    if record.is_probe:
        return
    scope = record.scope
    path = loggable(scope["path"])
    stages_ms = {stage: round(1000 * seconds, 3) for stage, seconds in record.stage_seconds.items()}
    fields: dict[str, Any] = {
        "request_id": scope["request_id"],
        "method": scope["method"],
        "path": path,
        "route": record.route,
        "status": record.status,
        "client": scope["client"][0] if scope.get("client") else None,
        "duration_ms": round(1000 * record.seconds, 3),
        **{f"{stage}_ms": spent for stage, spent in stages_ms.items()},
    }
    if record.task is not None:
        fields |= {"task": record.task, "inputs": record.num_inputs, "tokens": record.num_tokens}
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    details = [] if record.task is None else [f"{record.task} {record.num_inputs} inputs, {record.num_tokens} tokens"]
    details += [f"{stage} {spent:.1f} ms" for stage, spent in stages_ms.items()]
    logger.info(
        "%s %s %d in %.1f ms%s (%s)",
        scope["method"],
        path,
        record.status,
        1000 * record.seconds,
        "".join(f"; {detail}" for detail in details),
        scope["request_id"],
        extra={"fields": fields},
    )


def loggable(path: str) -> str:
    """Returns a path of bounded length that cannot break the line: clients choose paths."""
    return path[:_MAX_PATH_CHARS].encode("unicode_escape").decode("ascii")
