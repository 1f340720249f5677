"""The states of batches."""

import pytest

from penstock.server.batches.records import ENDS, BatchRecord, BatchStatus


@pytest.mark.parametrize("status", BatchStatus)
def test_only_final_states_have_an_end(status: BatchStatus) -> None:
    names = "id", "owner", "endpoint", "input_file_id", "output_id", "error_id", "completion_window"
    batch = BatchRecord(**dict.fromkeys(names, "x"), metadata=None, output_expires_s=1, created_at=2, expires_at=3)
    assert (batch.has_ended, batch.ended_at) == (False, None)
    batch.status = status
    if status is not BatchStatus.VALIDATING:
        setattr(batch, f"{status}_at", 7)
    assert batch.has_ended == (status in ENDS)
    assert batch.ended_at == (7 if status in ENDS else None)
