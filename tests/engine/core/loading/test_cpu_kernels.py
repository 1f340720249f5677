"""The choice between the C library and torch by settings, model, processor and measurement."""

from pathlib import Path

import pytest

from penstock.engine.core.device.device import resolve_device
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading import cpu_kernels
from penstock.engine.core.loading.cpu_kernels import Bfloat16Gain, choose_kernels
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.executors.cpu.array_encoder import ProductFormats
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import ModelInfo
from penstock.kernels.cpu import CpuKernelError, CpuLibrary, Format

from ....tables import cases
from ..conftest import SIZES, SaveFolder

pytestmark = pytest.mark.usefixtures("three_lane_library")


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The measured gains of bfloat16 over float32 and over widened weights, 1.0 at first."""
    measured = [1.0, 1.0]

    def measure(library: CpuLibrary, width: int) -> Bfloat16Gain:
        assert width == SIZES["hidden_size"]
        return Bfloat16Gain(*measured)

    monkeypatch.setattr(cpu_kernels, "bfloat16_gain", measure)
    return measured


def open_isa(isa: str | None) -> CpuLibrary:
    try:
        return CpuLibrary(1, isa=isa)
    except CpuKernelError as error:
        pytest.skip(str(error))


def use_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits this processor to an instruction set."""
    open_isa(isa).close()
    monkeypatch.setattr(cpu_kernels, "CpuLibrary", lambda num_lanes: CpuLibrary(num_lanes, isa=isa))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "libpenstock_cpu.so"
    monkeypatch.setattr(cpu_kernels, "CpuLibrary", lambda num_lanes: CpuLibrary(num_lanes, path=missing))


def resolve(folder: Path, device: str = "cpu", **options: object) -> tuple[ModelInfo, EngineConfig]:
    config = EngineConfig(model=str(folder), device="cpu", **options)
    info = with_device(resolve_model(config), *resolve_device(config))
    return (with_device(info, device, info.dtype) if device != "cpu" else info), config


def choose(folder: Path, **options: object) -> tuple[ModelInfo, CpuLibrary | None]:
    return choose_kernels(*resolve(folder, **options))


# Kernels


def test_supported_model_runs_on_the_c_library(save_folder: SaveFolder, gain: list[float]) -> None:
    info, library = choose(save_folder(), cpu_kernels="native", num_threads=3)
    assert library is not None
    assert library.num_lanes == 3
    assert (info.kernels, info.num_lanes, info.dtype) == (f"native, {library.isa}", 3, "float32")


@pytest.mark.parametrize(("device", "setting"), [("cpu", "torch"), ("cuda", "auto"), ("cuda", "native")])
def test_torch_runs_on_request_and_on_cuda(
    device: str, setting: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    gain[0] = 9.0
    info, library = choose(save_folder(), device=device, cpu_kernels=setting)
    assert library is None
    assert (info.kernels, info.device, info.dtype) == ("torch", device, "float32")


@pytest.mark.parametrize(("model", "dtype"), [("BertModel", "float16"), ("MambaModel", "float32"), ("mish", "float32")])
def test_unsupported_model_runs_on_torch(model: str, dtype: str, save_folder: SaveFolder, gain: list[float]) -> None:
    folder = save_folder("BertModel", hidden_act="mish") if model == "mish" else save_folder(model)
    info, library = choose(folder, dtype=dtype)
    assert library is None
    assert (info.kernels, info.dtype) == ("torch", dtype)
    with pytest.raises(ModelLoadError, match=f"do not support .* in {dtype}; with --cpu-kernels auto torch runs it"):
        choose(folder, dtype=dtype, cpu_kernels="native")


def test_missing_library_is_logged_once(
    no_library: None, save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_folder()
    runner = load_runner(resolve(folder)[1])
    assert isinstance(runner, ModelRunner)
    assert runner.info.kernels == "torch"
    (record,) = caplog.records
    assert "run `make native`" in record.getMessage()
    with pytest.raises(ModelLoadError, match=r"not built.* with --cpu-kernels auto torch runs the model"):
        choose(folder, cpu_kernels="native")


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize(("best", "replacement"), [("amx", "avx512bf16"), ("neonmmla", "neon"), ("neondot", "neon")])
def test_isa_with_wrong_products_is_not_used(
    best: str,
    replacement: str,
    is_right: bool,
    save_folder: SaveFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_as(num_lanes: int, isa: str | None = None) -> CpuLibrary:
        library = CpuLibrary(num_lanes)
        library.isa = isa or best
        return library

    monkeypatch.setattr(cpu_kernels, "CpuLibrary", open_as)
    monkeypatch.setattr(cpu_kernels, "has_exact_products", lambda library: is_right)
    info, _ = choose(save_folder(), num_threads=2)
    assert info.kernels == f"native, {best if is_right else replacement}"
    assert bool(caplog.records) is not is_right


# Type and arithmetic


@cases(__file__, "setting", "measured", "dtype")
def test_auto_takes_bfloat16_if_it_is_faster(
    setting: str, measured: float, dtype: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    gain[0] = measured
    info, library = choose(save_folder(), dtype=setting)
    assert library is not None
    assert info.dtype == dtype
    assert ("measured" in dict(info.sources).get("dtype", "")) == (setting == "auto" and dtype == "bfloat16")
    assert info.arithmetic == (None if dtype == "float32" else "float32")  # follows the other gain


@cases(__file__, "dtype", "measured", "arithmetic")
def test_arithmetic_is_bfloat16_if_it_is_faster(
    dtype: str, measured: float, arithmetic: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    gain[1] = measured
    with open_isa(None) as library:
        if dtype == "int8" and Format.INT8 not in library.formats:
            pytest.skip(f"{library.isa} has no products in int8")
    info, _ = choose(save_folder(), dtype=dtype)
    assert (info.dtype, info.arithmetic) == (dtype, arithmetic)
    rounding = Format.DOT if arithmetic == "bfloat16" else Format.F32
    products = {"int8": Format.INT8, "bfloat16": Format.DOT if arithmetic == "bfloat16" else Format.BF16}[dtype]
    assert ProductFormats.of(info) == (products, rounding)


def test_processor_without_bfloat16_computes_in_float32(
    save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_isa("plain", monkeypatch)
    folder = save_folder()
    info, library = choose(folder, dtype="bfloat16")
    assert library is not None
    assert (info.arithmetic, info.sources["arithmetic"]) == ("float32", "plain has no products in bfloat16")
    assert ProductFormats.of(info) == (Format.BF16, Format.F32)
    info, _ = choose(folder, dtype="auto")
    assert (info.dtype, info.arithmetic) == ("float32", None)
    assert ProductFormats.of(info) == (Format.F32, Format.F32)


@pytest.mark.parametrize(
    ("isa", "has_int8"), [("avx512vnni", True), ("avx2vnni", True), ("avx512", False), ("plain", False)]
)
def test_int8_needs_products_of_the_processor(
    isa: str, has_int8: bool, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_isa(isa, monkeypatch)
    if has_int8:
        info, _ = choose(save_folder(), dtype="int8")
        assert (info.dtype, info.arithmetic) == ("int8", "float32")
        assert ProductFormats.of(info) == (Format.INT8, Format.F32)
    else:
        message = f"AVX-512 VNNI, AVX-VNNI or the dot product of ARM, but this one has {isa}; set float32 or bfloat16"
        with pytest.raises(ModelLoadError, match=message):
            choose(save_folder(), dtype="int8")


def test_int8_is_rejected_on_torch(save_folder: SaveFolder) -> None:
    with pytest.raises(ModelLoadError, match="only torch runs BertModel here"):
        choose(save_folder(), dtype="int8", cpu_kernels="torch")
