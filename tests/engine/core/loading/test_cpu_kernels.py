"""The choice between the C library and torch depends on settings, model and measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.checkpoint.views import Floats
from penstock.engine.core.device.device import resolve_device
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading import cpu_kernels
from penstock.engine.core.loading.cpu_kernels import Bfloat16Gain, bfloat16_gain, choose_kernels
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.executors.cpu.array_encoder import Arithmetic
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.model_info import ModelInfo
from penstock.kernels.cpu import CpuKernelError, Format, Machine
from penstock.kernels.cpu.machine import PackedProduct

from ..conftest import SIZES, SaveFolder


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    try:
        Machine(1).close()
    except CpuKernelError as error:
        pytest.skip(str(error))


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What measuring bfloat16 gives, over float32 and over widened weights: 1.0 unless a test says otherwise."""
    measured = [1.0, 1.0]

    def as_measured(machine: Machine, width: int) -> Bfloat16Gain:
        assert width == SIZES["hidden_size"]
        return Bfloat16Gain(*measured)

    monkeypatch.setattr(cpu_kernels, "bfloat16_gain", as_measured)
    return measured


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives this one no more than an instruction set: `processor("avx2")`."""

    def has(isa: str) -> None:
        try:
            Machine(1, isa=isa).close()
        except CpuKernelError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(cpu_kernels, "Machine", lambda num_lanes: Machine(num_lanes, isa=isa))

    return has


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "libpenstock_cpu.so"
    monkeypatch.setattr(cpu_kernels, "Machine", lambda num_lanes: Machine(num_lanes, library=missing))


def resolved(folder: Path, device: str = "cpu", **options: object) -> tuple[ModelInfo, EngineConfig]:
    config = EngineConfig(model=str(folder), device="cpu", **options)
    info = with_device(resolve_model(config), *resolve_device(config))
    return (with_device(info, device, info.dtype) if device != "cpu" else info), config


@pytest.mark.parametrize("cpu_kernels", ["auto", "native"])
def test_native_kernels_are_taken(cpu_kernels: str, save_folder: SaveFolder, gain: list[float]) -> None:
    info, machine = choose_kernels(*resolved(save_folder(), cpu_kernels=cpu_kernels, num_threads=3))
    assert machine is not None
    assert machine.num_lanes == 3
    assert (info.kernels, info.num_lanes) == (f"native, {machine.isa}", 3)
    assert info.dtype == "float32"


def test_torch_is_taken_where_the_operator_says_so(save_folder: SaveFolder, gain: list[float]) -> None:
    info, machine = choose_kernels(*resolved(save_folder(), cpu_kernels="torch"))
    assert machine is None
    assert info.kernels == "torch"
    assert info.dtype == "float32"


@pytest.mark.parametrize(("measured", "dtype"), [(0.0, "float32"), (1.14, "float32"), (1.15, "bfloat16")])
def test_the_type_is_bfloat16_where_that_is_measured_to_be_faster(
    measured: float, dtype: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    gain[0] = measured
    info, machine = choose_kernels(*resolved(save_folder(), dtype="auto"))
    assert machine is not None
    assert info.dtype == dtype
    assert ("measured" in dict(info.sources).get("dtype", "")) == (dtype == "bfloat16")
    assert info.arithmetic == (None if dtype == "float32" else "float32")  # which is measured as well, by itself


@pytest.mark.parametrize(("measured", "arithmetic"), [(0.5, "float32"), (1.14, "float32"), (2.0, "bfloat16")])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_arithmetic_is_in_bfloat16_where_that_is_measured_to_be_faster(
    dtype: str, measured: float, arithmetic: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    """Also where the operator names the type: some processors run these products at half the speed of float32."""
    gain[1] = measured
    info, config = resolved(save_folder(), dtype=dtype)
    _skip_without_int8(dtype)
    info, _ = choose_kernels(info, config)
    assert (info.dtype, info.arithmetic) == (dtype, arithmetic)
    assert info.sources["arithmetic"] == f"measured: bfloat16 is {measured:.1f} times as fast as float32 here"
    rounding = Format.DOT if arithmetic == "bfloat16" else Format.F32
    products = {"int8": Format.INT8, "bfloat16": Format.DOT if arithmetic == "bfloat16" else Format.BF16}[dtype]
    assert Arithmetic.of(info) == (products, rounding)


def test_arithmetic_is_in_float32_where_there_is_no_other(
    processor: Callable[[str], None], save_folder: SaveFolder
) -> None:
    processor("plain")
    info, machine = choose_kernels(*resolved(save_folder(), dtype="bfloat16"))
    assert machine is not None
    assert (info.arithmetic, info.sources["arithmetic"]) == ("float32", "plain has no products in bfloat16")
    assert Arithmetic.of(info) == (Format.BF16, Format.F32)
    info, _ = choose_kernels(*resolved(save_folder(), dtype="auto"))
    assert (info.dtype, info.arithmetic) == ("float32", None)
    assert Arithmetic.of(info) == (Format.F32, Format.F32)


@pytest.mark.parametrize(("arithmetic", "measured"), [("float32", 9.0), ("bfloat16", 0.1)])
def test_what_was_measured_first_is_kept(
    arithmetic: str, measured: float, save_folder: SaveFolder, gain: list[float]
) -> None:
    gain[:] = measured, measured
    info, _ = choose_kernels(*resolved(save_folder(), dtype="bfloat16", arithmetic=arithmetic))
    assert (info.arithmetic, info.sources["arithmetic"]) == (arithmetic, "measured at the first start")


def test_int8_is_taken_where_the_processor_has_it(save_folder: SaveFolder) -> None:
    with Machine(1) as machine:
        has_it = Format.INT8 in machine.formats
    if has_it:
        info, machine = choose_kernels(*resolved(save_folder(), dtype="int8"))
        assert machine is not None
        assert info.dtype == "int8"
    else:
        with pytest.raises(ModelLoadError, match="AVX-512 VNNI"):
            choose_kernels(*resolved(save_folder(), dtype="int8"))


@pytest.mark.parametrize("isa", ["avx512vnni", "avx2vnni"])
def test_int8_needs_no_bfloat16(isa: str, processor: Callable[[str], None], save_folder: SaveFolder) -> None:
    processor(isa)
    info, _ = choose_kernels(*resolved(save_folder(), dtype="int8"))
    assert (info.dtype, info.arithmetic) == ("int8", "float32")
    assert Arithmetic.of(info) == (Format.INT8, Format.F32)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "plain"])
def test_int8_is_refused_in_words_where_the_processor_lacks_it(
    isa: str, processor: Callable[[str], None], save_folder: SaveFolder
) -> None:
    processor(isa)
    message = f"AVX-512 VNNI or AVX-VNNI, and {isa} is what this one has; take float32 or bfloat16"
    with pytest.raises(ModelLoadError, match=message):
        choose_kernels(*resolved(save_folder(), dtype="int8"))


def test_int8_is_refused_where_torch_would_run_the_model(save_folder: SaveFolder) -> None:
    with pytest.raises(ModelLoadError, match="nothing but torch runs BertModel here"):
        choose_kernels(*resolved(save_folder(), dtype="int8", cpu_kernels="torch"))


def test_int8_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="--dtype int8 is for the native kernels of a CPU"):
        resolve_device(EngineConfig(model="m", device="cuda", dtype="int8"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_type_that_the_operator_names_is_kept(dtype: str, save_folder: SaveFolder, gain: list[float]) -> None:
    gain[0] = 9.0
    info, machine = choose_kernels(*resolved(save_folder(), dtype=dtype))
    assert machine is not None
    assert info.dtype == dtype


def test_a_cuda_device_is_left_alone(save_folder: SaveFolder, gain: list[float]) -> None:
    gain[0] = 9.0
    for choice in ("auto", "native"):
        info, config = resolved(save_folder(), device="cuda", cpu_kernels=choice)
        chosen, machine = choose_kernels(info, config)
        assert machine is None
        assert (chosen.kernels, chosen.device, chosen.dtype) == ("torch", "cuda", info.dtype)


@pytest.mark.parametrize(("model", "dtype"), [("BertModel", "float16"), ("MambaModel", "float32"), ("mish", "float32")])
def test_what_they_do_not_know_runs_through_torch(
    model: str, dtype: str, save_folder: SaveFolder, gain: list[float]
) -> None:
    folder = save_folder("BertModel", hidden_act="mish") if model == "mish" else save_folder(model)
    info, machine = choose_kernels(*resolved(folder, dtype=dtype))
    assert machine is None
    assert (info.kernels, info.dtype) == ("torch", dtype)
    insisting = resolved(folder, dtype=dtype, cpu_kernels="native")
    with pytest.raises(ModelLoadError, match=f"do not know .* in {dtype}; --cpu-kernels auto lets torch run it"):
        choose_kernels(*insisting)


def test_without_the_library_one_line_says_what_is_lost(
    no_library: None, save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    info, machine = choose_kernels(*resolved(save_folder()))
    assert machine is None
    assert info.kernels == "torch"
    (record,) = caplog.records
    assert "and takes up to twice as long: the native kernels are not built: `make native`" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_without_the_library_a_model_still_runs(no_library: None, save_folder: SaveFolder) -> None:
    runner = load_runner(resolved(save_folder())[1])
    assert isinstance(runner, ModelRunner)
    assert runner.info.kernels == "torch"


def test_without_the_library_insisting_is_refused_in_one_line(no_library: None, save_folder: SaveFolder) -> None:
    with pytest.raises(ModelLoadError) as raised:
        choose_kernels(*resolved(save_folder(), cpu_kernels="native"))
    message = str(raised.value)
    assert message.startswith("There are no native kernels: the native kernels are not built")
    assert message.endswith("--cpu-kernels auto lets torch run it.")
    assert "\n" not in message


@pytest.mark.parametrize("is_right", [True, False])
def test_amx_runs_where_it_multiplies_right(
    is_right: bool, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def as_amx(num_lanes: int, isa: str | None = None) -> Machine:
        machine = Machine(num_lanes, isa=isa)
        machine.isa = "amx" if isa is None else isa
        return machine

    try:
        Machine(1, isa="avx512bf16").close()
    except CpuKernelError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cpu_kernels, "Machine", as_amx)
    monkeypatch.setattr(cpu_kernels, "multiplies_right", lambda machine: is_right)
    info, _ = choose_kernels(*resolved(save_folder(), num_threads=2))
    assert info.kernels == ("native, amx" if is_right else "native, avx512bf16")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [] if is_right else ["AMX gives wrong products on this processor: avx512bf16 runs in its place"]


def _skip_without_int8(dtype: str) -> None:
    with Machine(1) as machine:
        if dtype == "int8" and Format.INT8 not in machine.formats:
            pytest.skip(f"{machine.isa} has no products in int8")


@pytest.mark.parametrize("width", [1, 33, 384, 1024])
def test_the_gain_is_measured_where_there_is_something_to_measure(width: int) -> None:
    with Machine(1, isa="plain") as plain:
        assert bfloat16_gain(plain, width) is None
    with Machine(1) as machine:
        gain = bfloat16_gain(machine, width)
        assert (gain is None) == (Format.DOT not in machine.formats)
        assert gain is None or min(gain) > 0


@pytest.mark.parametrize("width", [1, 33, 384, 1024])
def test_gain_is_measured_with_weights_of_half_a_megabyte(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    pack = Machine.pack

    def recorded(machine: Machine, weights: Floats, bias: None, form: Format) -> PackedProduct:
        sizes.add(weights.size)
        return pack(machine, weights, bias, form)

    monkeypatch.setattr(Machine, "pack", recorded)
    with Machine(1) as machine:
        if bfloat16_gain(machine, width) is None:
            pytest.skip(f"{machine.isa} has no products in bfloat16")
    (size,) = sizes
    assert 0.9 * 2**18 < size <= 2**18


def test_what_is_measured_decides(save_folder: SaveFolder) -> None:
    """On whatever machine this is."""
    info, machine = choose_kernels(*resolved(save_folder(), dtype="bfloat16"))
    assert machine is not None
    if Format.DOT in machine.formats:
        assert info.sources["arithmetic"].startswith("measured: ")
    else:
        assert info.arithmetic == "float32"
