"""The device: which one "auto" means, what it says of its memory and of time, and which errors are of memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.core.device import device, memory as device_memory
from penstock.engine.core.device.device import (
    CudaMemory,
    device_errors,
    has_code_for,
    is_out_of_memory,
    multiply_exactly,
    resolve_device,
)
from penstock.engine.core.device.memory import HostMemory
from penstock.engine.core.device.stream import ForwardClock, HostEvent, HostStream
from penstock.engine.core.host import available_memory
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError, ForwardTime
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError

from ..played_stream import PlayedStream

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell")
def test_the_most_that_was_taken_at_once_is_seen_also_after_it_is_given_back() -> None:
    memory = HostMemory()
    memory.begin()
    before = memory.taken()
    assert before is not None
    assert before < 32 * MIB
    for _ in range(2):  # one after the other
        block = np.ones(64 * MIB, np.uint8)
        del block
    taken = memory.taken()
    assert taken is not None
    assert 60 * MIB <= taken < 96 * MIB  # the kernel counts the pages of a thread in lots
    memory.begin()
    taken = memory.taken()
    assert taken is not None
    assert taken < 32 * MIB


def test_a_kernel_that_does_not_tell_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_memory, "_CLEAR_REFS", tmp_path / "no folder" / "none")
    memory = HostMemory()
    memory.begin()
    assert memory.taken() is None


def test_what_is_free_is_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(HostMemory().available() - available_memory()) < 1 << 30
    monkeypatch.setattr(device_memory, "available_memory", lambda: 7)
    assert HostMemory().available() == 7


def test_a_gpu_counts_its_own_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = {"reset": False}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(reset=True))
    stats = {
        "allocated_bytes": {"all": {"current": 30 * MIB, "peak": 100 * MIB}},
        "reserved_bytes": {"all": {"current": 50 * MIB, "peak": 60 * MIB}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_stats", None)  # a flat and sorted copy of all statistics: too slow
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * MIB, 1000 * MIB))
    memory = CudaMemory(torch.device("cuda"))
    assert memory.available() == (200 + 50 - 30) * MIB  # what torch keeps but does not use is free as well
    memory.begin()
    assert peak["reset"]
    assert memory.taken() == 70 * MIB


def test_a_gpu_without_allocations_has_taken_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * MIB, 1000 * MIB))
    memory = CudaMemory(torch.device("cuda"))
    assert memory.available() == 200 * MIB
    memory.begin()
    assert memory.taken() == 0


def test_a_device_is_timed_by_itself_and_may_have_several_forwards_under_way(stream: PlayedStream) -> None:
    clock = ForwardClock(stream)
    stream.gate.clear()
    clock.begin()  # one that failed: it has no end
    marks = []
    for chunk_tokens in (3, 0):
        clock.begin()
        stream.delay_s = 0.02
        stream.to_host([torch.zeros(1)])
        marks.append(clock.end(chunk_tokens, 4))
        assert clock.take() == []
    stream.gate.set()
    marks[1].wait()
    times = clock.take()
    assert [(time.chunk_tokens, time.whole_tokens) for time in times] == [(3, 4), (0, 4)]
    assert all(time.seconds >= 0.02 for time in times)
    assert clock.take() == []


def test_the_clock_does_not_wait_for_the_forwards_behind(stream: PlayedStream) -> None:
    clock = ForwardClock(stream)
    clock.begin()
    clock.end(1, 0).wait()
    stream.gate.clear()
    clock.begin()
    clock.end(2, 0)
    assert [time.chunk_tokens for time in clock.take()] == [1]
    assert clock.take() == []
    stream.gate.set()


def test_products_on_cuda_are_added_up_in_float32() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
        multiply_exactly()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not products.allow_tf32
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision(precision)
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))


def test_errors_of_a_device_are_told_in_the_words_of_the_loop() -> None:
    for error, expected in (
        (torch.AcceleratorError("x: out of memory"), DeviceMemoryError),  # pinned memory of the host
        (torch.AcceleratorError("x"), DeviceLostError),
        (torch.OutOfMemoryError("x"), DeviceMemoryError),
        (MemoryError("x"), DeviceMemoryError),
        (RuntimeError("x"), RuntimeError),
        (ValueError("x"), ValueError),
    ):
        with pytest.raises(expected, match="x") as raised, device_errors():
            raise error
        assert type(raised.value) is expected


def test_the_clock_of_a_cpu_gives_each_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ForwardClock(HostStream())
    times = iter([1.0, 1.5, 4.0, 6.0, 8.0])
    monkeypatch.setattr(HostStream, "record_event", lambda stream: HostEvent(next(times)))
    clock.begin()  # one that failed: it has no end
    clock.begin()
    clock.end(3, 4)
    clock.begin()
    clock.end(0, 5)
    assert clock.take() == [ForwardTime(3, 4, 2.5), ForwardTime(0, 5, 2.0)]
    assert clock.take() == []


@pytest.mark.parametrize(
    ("num_devices", "has_bf16", "chosen", "dtype", "expected"),
    [
        (0, False, "auto", "auto", ("cpu", "float32")),
        (1, True, "auto", "auto", ("cuda", "bfloat16")),
        (1, False, "auto", "auto", ("cuda", "float16")),
        (2, True, "cuda:1", "float32", ("cuda:1", "float32")),
        (2, True, "cpu", "auto", ("cpu", "float32")),
        (0, False, "cpu", "bfloat16", ("cpu", "bfloat16")),
    ],
)
def test_what_auto_stands_for(
    monkeypatch: pytest.MonkeyPatch,
    num_devices: int,
    has_bf16: bool,
    chosen: str,
    dtype: str,
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    # The emulation that every device has does not count.
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16
    )
    assert resolve_device(EngineConfig(model="m", device=chosen, dtype=dtype)) == expected


@pytest.mark.parametrize(("num_devices", "chosen"), [(0, "cuda"), (1, "cuda:1"), (2, "cuda:2")])
def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, num_devices: int, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    message = f"--device is {chosen}, but torch {torch.__version__} sees {num_devices} CUDA devices".replace("+", r"\+")
    with pytest.raises(ModelLoadError, match=message):
        resolve_device(EngineConfig(model="m", device=chosen))


@pytest.mark.parametrize(
    ("num_devices", "way_out"), [(0, "install a CUDA build"), (1, "take cuda:0."), (3, "take cuda:0 to cuda:2.")]
)
def test_what_to_do_about_it_is_told(monkeypatch: pytest.MonkeyPatch, num_devices: int, way_out: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with pytest.raises(ModelLoadError, match=way_out):
        resolve_device(EngineConfig(model="m", device="cuda:7"))


PYPI = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""As torch 2.13 from PyPI has them."""


@pytest.mark.parametrize(
    ("capability", "compiled", "expected"),
    [
        ((7, 0), PYPI, False),
        ((6, 1), PYPI, False),
        ((7, 5), PYPI, True),
        ((8, 9), PYPI, True),  # runs the code for 8.6
        ((9, 0), PYPI, True),
        ((10, 3), PYPI, True),
        ((11, 0), PYPI, False),
        ((12, 1), PYPI, True),
        ((8, 0), ("sm_86",), False),  # machine code does not run on an earlier minor version
        ((8, 0), ("compute_75",), True),  # PTX runs on all later devices
        ((12, 0), ("sm_70", "compute_70"), True),
        ((7, 0), ("compute_75",), False),
        ((9, 0), ("sm_90a",), True),
        ((9, 5), ("sm_90a",), False),
        ((10, 0), ("compute_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("compute_100f",), False),
        ((9, 0), ("gfx90a", "gfx942"), True),  # a build for AMD says nothing about NVIDIA's versions
        ((9, 0), (), True),
    ],
    ids=str,
)
def test_which_devices_run_what_torch_was_compiled_for(
    capability: tuple[int, int], compiled: tuple[str, ...], expected: bool
) -> None:
    assert has_code_for(capability, compiled) is expected


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize(("chosen", "device"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:1", "cuda:1")])
def test_a_gpu_that_torch_has_no_code_for_is_named(
    monkeypatch: pytest.MonkeyPatch, chosen: str, device: str, dtype: str
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(PYPI))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (asked.append(index), (7, 0))[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100-SXM2-16GB")
    with pytest.raises(ModelLoadError) as caught:
        resolve_device(EngineConfig(model="m", device=chosen, dtype=dtype))
    message = caught.value.message
    assert message.startswith(f"--device is {device}, which is Tesla V100-SXM2-16GB of compute capability 7.0")
    for part in (
        f"torch {torch.__version__} has code for sm_75,",
        "sm_120 alone",
        "a build of torch for sm_70",
        "cpu.",
    ):
        assert part in message
    assert asked == [int(device.partition(":")[2] or 0)]


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update"
DRIVERS = {
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC\n",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (a@b)\nGCC\n",
}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch with CUDA 13.0 that can use no device; returns where the version of the driver is looked for."""

    def refuse() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(device, "_NVIDIA_DRIVER", tmp_path / "version")
    return tmp_path / "version"


@pytest.mark.parametrize("kind", DRIVERS)
def test_an_old_driver_is_named_before_the_cpu_serves(
    without_gpu: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    without_gpu.write_text(DRIVERS[kind])
    assert resolve_device(EngineConfig(model="m")) == ("cpu", "float32")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("driver 550.54.14", TOO_OLD, "CUDA 13.0 needs driver 580 or newer", "runs on the CPU", "--device cpu"):
        assert part in record.getMessage()


def test_an_old_driver_is_named_where_cuda_is_asked_for(without_gpu: Path) -> None:
    without_gpu.write_text(DRIVERS["closed"])
    with pytest.raises(ModelLoadError, match=r"sees 0 CUDA devices.*driver 550\.54\.14.*CUDA 13\.0 needs driver 580"):
        resolve_device(EngineConfig(model="m", device="cuda"))


@pytest.mark.parametrize("change", ["no driver", "torch for CPUs", "GPUs hidden", "--device cpu"])
def test_a_machine_that_shall_serve_on_its_cpu_is_not_warned(
    without_gpu: Path, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if change != "no driver":
        without_gpu.write_text(DRIVERS["closed"])
    if change == "torch for CPUs":
        monkeypatch.setattr(torch.version, "cuda", None)
    if change == "GPUs hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = EngineConfig(model="m", device="cpu" if change == "--device cpu" else "auto")
    assert resolve_device(config) == ("cpu", "float32")
    assert not caplog.records
