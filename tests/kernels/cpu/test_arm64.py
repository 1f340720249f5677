"""The kernels for 64-bit ARM, on processors that QEMU emulates: float64 and this processor give the same results.

`make test-arm64` prepares the folder build/arm64 with the wheel, Python and numpy for ARM.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest
import torch

from penstock.kernels.cpu import ActivationCode, CpuKernelError, CpuLibrary, Format, PoolingCode
from penstock.kernels.cpu._abi import digest

from ...conftest import ROOT
from ..assertions import assert_close
from .reference import encode
from .results import LENGTHS, SIZES, activation_inputs, compute, product_inputs
from .rounding import product_in_doubles
from .specs import DECODERS, SHAPES, Floats, make_spec, make_texts

Results = dict[str, Floats]
PREPARED = ROOT / "build" / "arm64"
PACKAGES = PREPARED / "packages"
# Instruction set that each processor of QEMU must select, and its formats.
PROCESSORS = {
    "max": ("neonmmla", set(Format)),
    "neoverse-n1": ("neondot", {Format.F32, Format.BF16, Format.INT8}),
    "cortex-a72": ("neon", {Format.F32, Format.BF16}),
}


@pytest.fixture(scope="module", params=PROCESSORS)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[set[Format], Results]:
    """Formats and results of an emulated processor."""
    emulator = shutil.which("qemu-aarch64")
    if emulator is None or not PACKAGES.is_dir():
        pytest.skip("needs QEMU and build/arm64: run make test-arm64")
    if digest(PACKAGES / "penstock/kernels/cpu") != digest():
        pytest.skip("build/arm64 has the wheel of other sources: run make test-arm64")
    file = tmp_path_factory.mktemp("arm64") / "results.npz"
    system = PREPARED / "system"
    python = [emulator, "-cpu", request.param, "-L", system, system / "usr/bin/python3.11"]
    subprocess.run(
        [*python, "-m", "kernels.cpu.results", file],
        env=os.environ | {"PYTHONPATH": f"{PACKAGES}:{ROOT / 'tests'}", "PYTHONSAFEPATH": "1"},
        check=True,
    )
    results = dict(np.load(file))
    formats = {Format(number) for number in results["formats"]}
    assert (results["isa"], formats) == PROCESSORS[request.param]
    return formats, results


@pytest.fixture(scope="module")
def here() -> Results:
    """Results of this processor."""
    try:
        library = CpuLibrary(2)
    except CpuKernelError as error:
        pytest.skip(str(error))
    with library:
        return compute(library)


def test_arm_products_equal_float64(arm: tuple[set[Format], Results]) -> None:
    formats, results = arm
    for form in formats:
        for sizes in SIZES:
            x, weight, bias, add = product_inputs(*sizes)
            rounded_to = Format.BF16 if sizes[0] % {Format.DOT: 2, Format.INT8: 4}.get(form, 1) else form
            expected, size = product_in_doubles(x, weight, bias, rounded_to)
            error = np.abs(results[f"{form.name} {sizes}"] - (expected + add))
            assert (error <= 5e-7 * (size + np.abs(add))).all(), f"{form.name} {sizes}"


def test_arm_forwards_equal_float64(arm: tuple[set[Format], Results]) -> None:
    """DOT and INT8 round both factors and the scores."""
    formats, results = arm
    texts = make_texts(LENGTHS)
    for shape in (*SHAPES, *DECODERS):
        for form in formats:
            expected, _ = encode(make_spec(shape), texts, Format.F32 if form is Format.INT8 else form)
            attention = Format.DOT if form is Format.DOT else Format.F32
            actual = torch.from_numpy(results[f"{shape.name} {form.name} {attention.name}"])
            if form in (Format.F32, Format.BF16):
                assert_close(f"{shape.name} {form.name}", expected, actual, 5e-6)
            else:
                cosines = torch.cosine_similarity(actual.double(), expected, dim=1)
                assert cosines.min() > (0.9995 if form is Format.DOT else 0.99), f"{shape.name} {form.name}"


def test_arm_products_equal_x86_bit_for_bit(arm: tuple[set[Format], Results], here: Results) -> None:
    """F32 and BF16 add in order with fused multiplications; INT8 adds integers. DOT rounds differently."""
    formats, results = arm
    for form in formats - {Format.DOT}:
        for name in (f"{form.name} {sizes}" for sizes in SIZES):
            if name in here:
                assert np.array_equal(results[name], here[name]), name


def test_arm_activations_and_pooling_equal_x86(arm: tuple[set[Format], Results], here: Results) -> None:
    x = np.abs(activation_inputs())
    for name in (*(activation.name for activation in ActivationCode), *(f"pool {kind.name}" for kind in PoolingCode)):
        expected, actual = here[name], arm[1][name]
        least = np.minimum(x, 1.0) if name in ActivationCode.__members__ else np.zeros_like(expected)
        finite = np.isfinite(expected)
        assert np.array_equal(actual[~finite], expected[~finite], equal_nan=True), name
        limit = 1e-6 * np.maximum(np.abs(expected), least)[finite] + np.finfo(np.float32).tiny
        assert (np.abs(actual[finite] - expected[finite]) <= limit).all(), name


def test_arm_forwards_equal_x86(arm: tuple[set[Format], Results], here: Results) -> None:
    names = [name for name in arm[1] if name.split()[0] in {shape.name for shape in (*SHAPES, *DECODERS)}]
    for name in names:
        if name not in here:
            continue
        expected, actual = torch.from_numpy(here[name]), torch.from_numpy(arm[1][name])
        if name.endswith(("F32 F32", "BF16 F32")):
            assert_close(name, expected, actual, 5e-6)
        else:
            cosines = torch.cosine_similarity(actual.double(), expected.double(), dim=1)
            assert cosines.min() > (0.9999 if name.endswith("DOT DOT") else 0.9995), name
