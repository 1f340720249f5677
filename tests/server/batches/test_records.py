"""The states of batches."""

import pytest

from penstock.server.batches.records import TERMINAL_STATUSES, BatchStatus

from .helpers import record


@pytest.mark.parametrize("status", BatchStatus)
def test_only_final_states_have_an_end(status: BatchStatus) -> None:
    batch = record()
    assert (batch.has_ended, batch.ended_at) == (False, None)
    batch.status = status
    if status is not BatchStatus.VALIDATING:
        setattr(batch, f"{status}_at", 7)
    assert batch.has_ended == (status in TERMINAL_STATUSES)
    assert batch.ended_at == (7 if status in TERMINAL_STATUSES else None)
