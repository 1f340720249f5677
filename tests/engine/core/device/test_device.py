"""The selection of the device, its memory, and the errors that mean a shortage of memory."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from penstock.engine.core.device import device as device_module
from penstock.engine.core.device.device import (
    CudaMemory,
    device_errors,
    has_code_for,
    is_out_of_memory,
    resolve_device,
    set_exact_products,
)
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError

from ....tables import cases, table

MIB = 1 << 20
CUDA = torch.device("cuda")


@pytest.fixture
def cuda_stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, int]]]:
    """The memory statistics of torch, empty at first, on a device with 200 MiB free."""
    stats: dict[str, dict[str, dict[str, int]]] = {}

    def reset(device: torch.device) -> None:
        if stats:
            stats["allocated_bytes"]["all"]["peak"] = 100 * MIB

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_stats", None)  # flattens and sorts all statistics, which is slow
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * MIB, 1000 * MIB))
    return stats


def test_gpu_memory_includes_the_cache_of_torch(cuda_stats: dict[str, dict[str, dict[str, int]]]) -> None:
    memory = CudaMemory(CUDA)
    assert memory.available() == 200 * MIB
    memory.reset_peak()
    assert memory.peak_bytes() == 0
    cuda_stats["allocated_bytes"] = {"all": {"current": 30 * MIB, "peak": 900 * MIB}}
    cuda_stats["reserved_bytes"] = {"all": {"current": 50 * MIB, "peak": 60 * MIB}}
    assert memory.available() == (200 + 50 - 30) * MIB
    memory.reset_peak()
    assert memory.peak_bytes() == 70 * MIB


def test_cuda_products_are_summed_in_float32() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
        set_exact_products()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not products.allow_tf32
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision(precision)
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before


def test_torch_errors_become_runner_errors() -> None:
    with pytest.raises(RuntimeError) as cpu_error:
        torch.empty(1 << 50)
    for error, expected in (
        (cpu_error.value, DeviceMemoryError),
        (torch.AcceleratorError("x: out of memory"), DeviceMemoryError),  # pinned memory
        (torch.AcceleratorError("x"), DeviceLostError),
        (torch.OutOfMemoryError("x"), DeviceMemoryError),
        (MemoryError("x"), DeviceMemoryError),
        (RuntimeError("x"), RuntimeError),
        (ValueError("DefaultCPUAllocator x"), ValueError),
    ):
        assert is_out_of_memory(error) is (expected is DeviceMemoryError)
        with pytest.raises(expected) as raised, device_errors():
            raise error
        assert type(raised.value) is expected
        assert str(raised.value) == str(error)


# Selection

PYPI = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""The targets of torch 2.13 from PyPI."""
CODE = table(__file__, "code_runs_on_compatible_devices")


@cases(__file__, "num_devices", "has_bf16", "chosen", "dtype", "expected")
def test_auto_takes_cuda_and_its_fastest_dtype(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, has_bf16: bool, chosen: str, dtype: str, expected: list[str]
) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or has_bf16

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert resolve_device(EngineConfig(model="m", device=chosen, dtype=dtype)) == tuple(expected)


@cases(__file__, "num_devices", "chosen", "remedy")
def test_missing_device_is_rejected_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, chosen: str, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with pytest.raises(ModelLoadError, match=f"device is {chosen}, .* finds {num_devices} CUDA devices; {remedy}"):
        resolve_device(EngineConfig(model="m", device=chosen))


@pytest.mark.parametrize(("capability", "compiled", "expected"), CODE.values(), ids=CODE)
def test_code_runs_on_compatible_devices(capability: list[int], compiled: list[str], expected: bool) -> None:
    assert has_code_for((capability[0], capability[1]), tuple(compiled)) is expected


@pytest.mark.parametrize(("chosen", "index"), [("auto", 0), ("cuda:1", 1)])
def test_gpu_without_code_in_torch_is_rejected(monkeypatch: pytest.MonkeyPatch, chosen: str, index: int) -> None:
    indices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(PYPI))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (indices.append(index), (7, 0))[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100-SXM2-16GB")
    with pytest.raises(ModelLoadError, match=r"Tesla V100.* 7\.0.* supports only sm_75,.* a build of torch for sm_70"):
        resolve_device(EngineConfig(model="m", device=chosen))
    assert indices == [index]


def test_int8_is_rejected_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="--dtype int8 needs the native kernels of a CPU"):
        resolve_device(EngineConfig(model="m", device="cuda", dtype="int8"))


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update"
DRIVERS = {
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC\n",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (a@b)\nGCC\n",
}


@pytest.fixture
def driver_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch with CUDA 13.0 that can use no device, and the file with the driver's version."""

    def reject() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", reject)
    monkeypatch.setattr(device_module, "_NVIDIA_DRIVER", tmp_path / "version")
    return tmp_path / "version"


@pytest.mark.parametrize("kind", DRIVERS)
def test_old_driver_is_reported(driver_file: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    driver_file.write_text(DRIVERS[kind])
    assert resolve_device(EngineConfig(model="m")) == ("cpu", "float32")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("driver 550.54.14", "CUDA 13.0 needs driver 580 or newer", "--device cpu"):
        assert part in record.getMessage()
    with pytest.raises(ModelLoadError, match=r"finds 0 CUDA devices.*driver 550\.54\.14.*CUDA 13\.0 needs driver 580"):
        resolve_device(EngineConfig(model="m", device="cuda"))
