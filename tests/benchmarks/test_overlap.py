"""Idle time of a simulated device, in processor time."""

import pytest
from overlap import LOADS, measure


@pytest.mark.parametrize("load", list(LOADS))
@pytest.mark.parametrize(("host_ms", "most"), [(0.0, 0.03), (4.0, 0.1)])
def test_device_with_two_running_forwards_is_not_idle(load: str, host_ms: float, most: float) -> None:
    rounds = [measure(load, host_ms, 2, 1.0, 5.0, "processor") for _ in range(3)]
    assert min(found["idle_share"] for found in rounds) < most
    assert all(found["forwards"] > 50 for found in rounds)
