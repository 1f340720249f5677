"""A check for schemathesis: a valid request succeeds, or is rejected for a reason that a schema cannot express.

It replaces positive_data_acceptance of schemathesis, which expects success.
"""

import json
import re
from pathlib import Path

import schemathesis

_REASONS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""Patterns of messages, by cause:

of_the_model: features that the served model lacks. The OpenAPI document is the same for every model.
of_two_fields: fields that contradict each other.
of_invocations: the served model decides which bodies /invocations accepts.
"""


def _is_known(path: str, message: str) -> bool:
    causes = ["of_the_model", "of_two_fields", *(["of_invocations"] if path == "/invocations" else [])]
    reasons = [pattern for cause in causes for pattern in _REASONS[cause]]
    return any(re.search(reason, message) for reason in reasons)


@schemathesis.check
def rejected_with_reason(ctx, response, case) -> None:
    """Fails on a 4xx for a valid request without a known reason."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 422, 424):
        return
    message = response.json()["message"]
    assert _is_known(case.operation.path, message), f"A valid request was rejected: {message}"
