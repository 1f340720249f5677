"""Body and response memory: one client may hold half of each."""

from typing import Any

import pytest

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError
from penstock.server.admission import AdmissionController, BodyMemory, LimitError, ServerRejectionReason
from penstock.server.request_state import state_of
from penstock.server.response_size import ResponseSize
from penstock.server.settings import ServerSettings

MIB = 2**20


def controller(max_body_bytes: int = 100, response_memory: int = 100) -> AdmissionController:
    return AdmissionController(ServerSettings(max_body_bytes=max_body_bytes, response_memory=response_memory))


def scope(address: str = "10.0.0.1", key: str = "") -> dict[str, Any]:
    scope = {"client": (address, 1)}
    state_of(scope).client = key
    return scope


def held_body(
    admission: AdmissionController, request: dict[str, Any], num_bytes: int, num_values: int = 0
) -> BodyMemory:
    memory = admission.body_memory({**request, "headers": []})
    assert memory is not None
    try:
        memory.add_bytes(num_bytes)
        memory.add_values(num_values)
    except LimitError:
        memory.release()
        raise
    return memory


def test_one_client_holds_half_of_the_body_memory() -> None:
    admission = controller()  # 3,200 bytes
    held = [held_body(admission, scope("a"), 100) for _ in range(16)]
    with pytest.raises(LimitError, match="Your other requests hold 1600 bytes of the memory for bodies") as rejected:
        held_body(admission, scope("a"), 1)
    assert (rejected.value.status_code, rejected.value.reason) == (503, ServerRejectionReason.BODY_MEMORY_SHARE)
    others = [held_body(admission, scope("b"), 100) for _ in range(16)]
    with pytest.raises(
        LimitError,
        match="The memory for bodies is full: other requests hold 3200 bytes, and this one takes 1; the limit is 3200",
    ) as rejected:
        held_body(admission, scope("c"), 1)
    assert (rejected.value.status_code, rejected.value.reason) == (503, ServerRejectionReason.BODY_MEMORY)
    held.pop().release()
    held.append(held_body(admission, scope("a"), 100))
    for memory in (*held, *others):
        memory.release()
    assert admission.bodies.used == 0


def test_values_count_in_the_body_memory() -> None:
    admission = controller()
    large = held_body(admission, scope("a"), 100, num_values=200)  # alone it may hold more than half
    with pytest.raises(LimitError) as rejected:
        held_body(admission, scope("b"), 100, num_values=200)
    assert rejected.value.reason == ServerRejectionReason.BODY_MEMORY
    large.release()
    held_body(admission, scope("b"), 100, num_values=200)


def test_dense_values_have_a_separate_memory() -> None:
    admission = controller(max_body_bytes=100 * MIB)
    memory = held_body(admission, scope("a"), 1, num_values=3 * MIB)
    dense = admission._dense_values
    assert dense.used == 8 * (3 * MIB - 1)
    with pytest.raises(LimitError, match="one client may hold 33554432"):
        held_body(admission, scope("a"), 1, num_values=3 * MIB)
    held_body(admission, scope("b"), 3 * MIB, num_values=3 * MIB)
    assert dense.used == 8 * (3 * MIB - 1), "the other body has one value per byte"
    memory.release()
    assert dense.used == 0


def test_small_bodies_and_responses_hold_no_memory() -> None:
    admission = AdmissionController(ServerSettings())
    for length in (b"4096", b"4097"):
        request = {**scope(), "headers": [(b"content-length", length)]}
        assert (admission.body_memory(request) is None) is (length == b"4096")
        state_of(request).is_batch_line = True
        assert admission.body_memory(request) is None
    for num_bytes, held in ((MIB, 0), (MIB + 1, MIB + 1), (5_999_999, 5_999_999), (6_000_000, 5), (256 * MIB, 5)):
        request = scope()
        admission.reserve_response(request, ResponseSize(num_bytes, 5), param="input", remedy="")
        assert admission.responses.used == held
        admission.release(request)
        assert (admission.responses.used, state_of(request).response_memory) == (0, None)
    with pytest.raises(
        InvalidRequestError, match=r"would have about 268435457 bytes; the limit is 268435456\. Send less"
    ):
        admission.reserve_response(scope(), ResponseSize(256 * MIB + 1, 5), param="input", remedy="Send less.")


def hold(admission: AdmissionController, request: dict[str, Any], num_bytes: int) -> None:
    admission.reserve_response(request, ResponseSize(10 * MIB, num_bytes), param="input", remedy="")


def rejection(admission: AdmissionController, request: dict[str, Any], num_bytes: int) -> EngineOverloadedError:
    with pytest.raises(EngineOverloadedError) as rejected:
        hold(admission, request, num_bytes)
    return rejected.value


@pytest.mark.parametrize(("first", "other"), [(("a",), ("b",)), (("a", "k"), ("a", "l"))])
def test_one_client_holds_half_of_the_response_memory(first: tuple[str, ...], other: tuple[str, ...]) -> None:
    admission = controller()
    held = [scope(*first) for _ in range(5)]
    for each in held:
        hold(admission, each, 10)
    error = rejection(admission, scope(*first), 1)
    assert error.reason == ServerRejectionReason.RESPONSE_MEMORY_SHARE
    assert (
        "Your other requests hold 50 bytes of the response memory, and this one takes 1; one client may hold 50"
        in error.message
    )
    hold(admission, scope(*other), 50)
    assert rejection(admission, scope("c", "m"), 1).reason == ServerRejectionReason.RESPONSE_MEMORY
    admission.release(held[0])
    hold(admission, scope(*first), 10)
    assert admission.responses.used == 100


def test_one_large_response_may_take_more_than_half() -> None:
    admission = controller()
    large = scope()
    hold(admission, large, 60)
    hold(admission, large, 20)  # a further part of it
    assert admission.responses.used == 80
    assert rejection(admission, scope(), 1).reason == ServerRejectionReason.RESPONSE_MEMORY_SHARE
    admission.release(large)
    assert admission.responses.used == 0
    admission.release(large)
    hold(admission, scope(), 1_000)  # nothing else is held


def test_each_process_has_its_part_of_the_memory() -> None:
    admission = AdmissionController(ServerSettings(max_body_bytes=100, response_memory=100), num_processes=4)
    assert (admission.bodies.limit, admission.responses.limit) == (800, 25)
    assert (admission.fetches.limit, admission._dense_values.limit) == (16, 16 * MIB)
    admission = AdmissionController(ServerSettings(response_memory=100), num_processes=128)
    assert (admission.fetches.limit, admission.responses.limit) == (1, 1)
