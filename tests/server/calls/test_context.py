"""The deadline of a request is the earlier one of its own and the server's."""

import math
from types import SimpleNamespace

import pytest

from penstock.engine.protocol.errors import DeadlineExceededError, OwnDeadlineExceededError
from penstock.server.calls.context import ServerContext
from penstock.server.request_state import RequestState
from penstock.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("own_s", "longest_s", "timeout_s", "is_own"),
    [(None, 0.0, math.inf, False), (None, 5.0, 5.0, False), (4.0, 5.0, 4.0, True), (5.0, 5.0, 5.0, False)],
)
def test_earlier_deadline_counts(own_s: float | None, longest_s: float, timeout_s: float, is_own: bool) -> None:
    served = SimpleNamespace(settings=ServerSettings(request_timeout_s=longest_s))
    deadline = ServerContext.deadline(served, RequestState(timeout_s=own_s))
    assert deadline == (timeout_s, is_own)
    assert type(deadline.error()) is (OwnDeadlineExceededError if is_own else DeadlineExceededError)
