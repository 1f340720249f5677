"""causal_conv1d, selective_scan and ssd equal their references on every backend."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import make_blocks, ssd

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import ConvCase, ScanCase, SsdCase, make_conv_inputs, make_cu_seqlens, make_scan_inputs, make_ssd_inputs
from .parameters import FLOAT_DTYPES, TARGETS, TRITON_TARGETS, Target, cases_of, every_pair
from .references import causal_conv1d_reference, selective_scan_reference, ssd_reference


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel with its cases.

    Attributes:
        case: Small sizes; tests replace the lengths.
        tolerance: float32: sums in another order. 16 bits: one unit in the last target; ssd rounds before its products.
        rows: Inputs with one row per token.
        constants: Inputs without tokens.
        skip: The optional input that does not depend on tokens.
    """

    name: str
    function: Any
    reference: Any
    make: Any
    cases: list[Any]
    case: Any
    tolerance: dict[torch.dtype, float]
    rows: tuple[str, ...]
    constants: tuple[str, ...]
    skip: str

    def __call__(self, case: Any, inputs: Any, has_states: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns the rows and the final states."""
        arguments = self._arguments(case, inputs, has_states)
        y, final = self.function(**arguments | ({"chunk_size": CHUNK_SIZE} if self is SSD else {}) | options)
        assert final is not None
        return y, final

    def expect(self, case: Any, inputs: Any, has_states: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the rows and the final states of the reference."""
        y, final = self.reference(**self._arguments(case, inputs, has_states))
        return y, final

    def _arguments(self, case: Any, inputs: Any, has_states: bool) -> dict[str, Any]:
        return (
            {name: getattr(inputs, name) for name in (*self.rows, *self.constants, self.skip)}
            | {
                "cu_seqlens": make_cu_seqlens(case.seq_lens, inputs.x.device),
                "seq_lens": case.seq_lens,
                "initial_states": inputs.initial_states if has_states else None,
                "return_final_states": True,
            }
            | ({"activation": "silu"} if self is CONV else {})
        )

    def cut(self, inputs: Any, rows: slice, **changes: Any) -> Any:
        """The inputs of some tokens."""
        return replace(inputs, **{name: getattr(inputs, name)[rows] for name in self.rows}, **changes)


# So small that a few rows make several chunks.
CHUNK_SIZE = 16 if IS_INTERPRETED else None
ONE_UNIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
CONV = Kernel(
    name="causal_conv1d",
    function=causal_conv1d,
    reference=causal_conv1d_reference,
    make=make_conv_inputs,
    cases=cases_of(ConvCase, "causal_conv1d"),
    case=ConvCase("", (), 6),
    tolerance=ONE_UNIT | {torch.float32: 2e-6},
    rows=("x",),
    constants=("weight",),
    skip="bias",
)
SCAN = Kernel(
    name="selective_scan",
    function=selective_scan,
    reference=selective_scan_reference,
    make=make_scan_inputs,
    cases=cases_of(ScanCase, "selective_scan"),
    case=ScanCase("", (), 6, 8),
    tolerance=ONE_UNIT | {torch.float32: 5e-6},
    rows=("x", "dt", "b", "c"),
    constants=("a",),
    skip="d",
)
SSD = Kernel(
    name="ssd",
    function=ssd,
    reference=ssd_reference,
    make=make_ssd_inputs,
    cases=cases_of(SsdCase, "ssd"),
    case=SsdCase("", (), 4, 8, 2, 16),
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2},
    rows=("x", "dt", "b", "c"),
    constants=("a",),
    skip="d",
)
KERNELS = (CONV, SCAN, SSD)


class KernelCase(NamedTuple):
    kernel: Kernel
    case: Any

    @property
    def name(self) -> str:
        return f"{self.kernel.name}-{self.case.name}"


KERNEL_CASES = [KernelCase(kernel, case) for kernel in KERNELS for case in kernel.cases]

kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def is_quick(kernel_case: KernelCase, dtype: torch.dtype, has_states: bool, **_: Any) -> bool:
    """The interpreter takes milliseconds for a row and has no products in bfloat16."""
    kernel, case = kernel_case
    if not IS_INTERPRETED:
        return True
    if kernel is SSD:
        return case.is_quick and (dtype == torch.float32 or (dtype == torch.float16 and has_states))
    return case.is_quick and dtype != torch.float16


@every_pair(is_quick, target=TARGETS, kernel_case=KERNEL_CASES, dtype=FLOAT_DTYPES, has_states=[False, True])
def test_backend_equals_reference(
    target: Target, kernel_case: KernelCase, dtype: torch.dtype, has_states: bool
) -> None:
    kernel, case = kernel_case
    inputs = kernel.make(case, dtype, target.device)
    expected, expected_final = kernel.expect(case, inputs, has_states)
    actual, final = kernel(case, inputs, has_states, backend=target.backend)
    assert actual.dtype == dtype
    assert final.dtype == (dtype if kernel is CONV else torch.float32)
    assert actual.is_contiguous()
    assert_close("y", expected, actual, kernel.tolerance[dtype])
    final_tolerance = {CONV: 0.0, SCAN: 5e-6, SSD: SSD.tolerance[dtype]}[kernel]
    assert_close("final", expected_final, final, final_tolerance)


@kernels
def test_optional_inputs_may_be_left_out(target: Target, kernel: Kernel) -> None:
    case = replace(kernel.case, seq_lens=(5, 33))
    inputs = kernel.make(case, device=target.device)
    arguments = {name: getattr(inputs, name) for name in (*kernel.rows, *kernel.constants)}
    arguments |= {"cu_seqlens": inputs.cu_seqlens, "seq_lens": case.seq_lens}
    arguments |= {"bias": None} if kernel is CONV else {}
    expected, _ = kernel.reference(**arguments)
    actual, final = kernel.function(**arguments, backend=target.backend)
    assert final is None
    assert_close("y", expected, actual, 1e-5)


@pytest.mark.parametrize("size", [7] if IS_INTERPRETED else [1, 7, 64])
@kernels
def test_chunks_equal_the_whole(target: Target, kernel: Kernel, size: int) -> None:
    length = 20 if IS_INTERPRETED else 150
    case = replace(kernel.case, seq_lens=(length,))
    inputs = kernel.make(case, device=target.device)
    whole, whole_final = kernel(case, inputs, backend=target.backend)
    state = inputs.initial_states
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        part = replace(case, seq_lens=(rows.stop - start,))
        y, state = kernel(part, kernel.cut(inputs, rows, initial_states=state), backend=target.backend)
        assert_close(f"rows from {start}", whole[rows], y, 1e-5, whole.abs().max().item())
    assert_close("final", whole_final, state, 1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy warns in the interpreter
@kernels
def test_nan_stays_in_its_sequence(target: Target, kernel: Kernel) -> None:
    lengths = (2, 5, 0, 1, 17) if IS_INTERPRETED else (2, 130, 0, 1, 67)
    case, end = replace(kernel.case, seq_lens=lengths), 2 + lengths[1]
    clean, dirty = (kernel.make(case, device=target.device) for _ in range(2))
    for name in kernel.rows:
        getattr(dirty, name)[2:end] = float("nan")
    dirty.initial_states[1] = float("nan")
    expected, expected_final = kernel(case, clean, backend=target.backend)
    actual, final = kernel(case, dirty, backend=target.backend)
    assert actual[2:end].isnan().all()
    others = [0, 2, 3, 4]
    assert torch.equal(actual[end:], expected[end:])
    assert torch.equal(actual[:2], expected[:2])
    assert torch.equal(final[others], expected_final[others])


@pytest.mark.parametrize(
    ("kernel", "limits", "options"),
    [
        (CONV, {"BLOCK_ELEMENTS": 1}, {}),
        (SCAN, {"GROUP_ELEMENTS": 3 * 12 * 16, "BLOCK_ELEMENTS": 12 * 12 * 16}, {}),
        *((SSD, {}, {"chunk_size": size}) for size in (16, 32, 128)),
    ],
)
def test_blocks_of_torch_change_nothing(
    kernel: Kernel, limits: dict[str, int], options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = kernel.cases[0]
    inputs = kernel.make(case)
    expected, expected_final = kernel(case, inputs, backend="torch")
    for name, value in limits.items():
        monkeypatch.setattr(f"penstock.kernels.{kernel.name}.{name}", value)
    actual, final = kernel(case, inputs, backend="torch", **options)
    assert_close("y", expected, actual, 1e-5)
    assert_close("final", expected_final, final, 1e-5)


@every_pair(target=TRITON_TARGETS, has_states=[False, True])
def test_scan_chunks_of_triton_equal_reference(
    target: Target, has_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.selective_scan import _triton

    # Sequences without rows, of whole chunks, and of one row more or less.
    case = ScanCase("", (3, 8, 0, 9, 16, 1), 40, 6)
    inputs = make_scan_inputs(case, device=target.device)
    expected, expected_final = SCAN.expect(case, inputs, has_states)
    for size in (8,) if IS_INTERPRETED else (4, 8, 16):
        monkeypatch.setattr(_triton, "CHUNK_SIZE", size)
        actual, final = SCAN(case, inputs, has_states, backend=target.backend)
        assert_close("y", expected, actual, 5e-6)
        assert_close("final", expected_final, final, 5e-6)
        cut = SCAN.cut(inputs, slice(20, 36))
        alone, _ = SCAN(replace(case, seq_lens=(16,)), cut, False, backend=target.backend)
        together, _ = SCAN(case, inputs, False, backend=target.backend)
        assert torch.equal(alone, together[20:36])


def test_blocks_of_ssd_have_powers_of_two_of_rows_and_chunks() -> None:
    blocks = make_blocks([3] * 7 + [17, 150], chunk_size=64, num_heads=1)
    sizes = [(block.size, len(block.chunks)) for block in blocks]
    assert sizes == [(64, 2), (32, 1), (16, 4), (16, 2), (16, 1), (32, 1)]


@every_pair(target=TRITON_TARGETS, dtype=[torch.float32, torch.float16] if IS_INTERPRETED else FLOAT_DTYPES)
def test_rows_do_not_depend_on_other_lengths(target: Target, dtype: torch.dtype) -> None:
    case = SsdCase("", (64, 150), 2, 8, 1, 16)
    inputs = make_ssd_inputs(case, dtype, target.device)
    together, _ = SSD(case, inputs, False, backend=target.backend, chunk_size=None)
    first = SSD.cut(inputs, slice(64))
    alone, _ = SSD(replace(case, seq_lens=(64,)), first, False, backend=target.backend, chunk_size=None)
    assert torch.equal(together[:64], alone)


@pytest.mark.parametrize("step", [0.0, 1e-4, 10.0, 50.0])
def test_extreme_steps_equal_reference(target: Target, step: float) -> None:
    case = SsdCase("", (33 if IS_INTERPRETED else 200,), 2, 4, 1, 8)
    inputs = make_ssd_inputs(case, device=target.device)
    inputs.dt.fill_(step)
    # Small steps after large ones: a difference of running sums would lose them.
    inputs.dt[case.seq_lens[0] // 2 :, 0] = 1e-3
    expected, expected_final = SSD.expect(case, inputs)
    actual, final = SSD(case, inputs, backend=target.backend)
    assert_close("y", expected, actual, 1e-5)
    assert_close("final", expected_final, final, 1e-5)
