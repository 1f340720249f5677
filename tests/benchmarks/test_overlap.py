"""What the loop leaves of a simulated device's time, by the processor's clock: the machine is shared."""

import pytest
from overlap import LOADS, measure


@pytest.mark.parametrize("load", list(LOADS))
@pytest.mark.parametrize(("host_ms", "most"), [(0.0, 0.03), (4.0, 0.1)])
def test_a_device_with_two_forwards_under_way_is_never_idle(load: str, host_ms: float, most: float) -> None:
    rounds = [measure(load, host_ms, 2, 1.0, 5.0, "processor") for _ in range(3)]
    assert min(found["idle_share"] for found in rounds) < most
    assert all(found["forwards"] > 50 for found in rounds)


def test_with_one_forward_under_way_the_device_waits_for_the_host() -> None:
    found = measure("whole texts", 4.0, 1, 1.0, 5.0, "processor")
    assert found["idle_share"] > 0.4


def test_a_device_that_is_a_process_of_its_own_says_how_long_it_was_idle() -> None:
    found = measure("whole texts", 0.0, 1, 0.3, 5.0, "wall")
    assert found["forwards"] > 5
    assert found["forward_ms"] >= 5
    assert 0 < found["idle_share"] < 1
