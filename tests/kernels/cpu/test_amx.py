"""AMX products and attention, emulated in C if the processor has no AMX."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.cpu import CpuEncoder, CpuKernelError, CpuLibrary, Format, has_exact_products

from .specs import SHAPES, make_spec, make_texts

Opener = Callable[[int], CpuLibrary]


@pytest.fixture
def amx(request: pytest.FixtureRequest) -> Opener:
    """Opens a library with AMX and this number of lanes."""
    try:
        CpuLibrary(1, isa="amx").close()
    except CpuKernelError:
        path: Path = request.getfixturevalue("amx_model")
        return lambda num_lanes: CpuLibrary(num_lanes, isa="amx", path=path)
    return lambda num_lanes: CpuLibrary(num_lanes, isa="amx")


@pytest.mark.parametrize("form", [Format.DOT, Format.INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[7]], ids=lambda shape: shape.name)
def test_bits_do_not_depend_on_batch_and_lanes(amx: Opener, shape, form: Format) -> None:
    spec, texts = make_spec(shape), make_texts([1, 2, 16, 17, 33, 64, 90, 200])
    with amx(1) as library:
        encoder = CpuEncoder(library, spec, form, attention_format=Format.DOT)
        alone = [encoder.begin(text.input()).result()[0] for text in map(texts.__getitem__, range(8))]
    for num_lanes in (1, 2, 3):
        with amx(num_lanes) as library:
            encoder = CpuEncoder(library, spec, form, attention_format=Format.DOT)
            assert np.array_equal(encoder.begin(texts.input()).result()[0], np.concatenate(alone))
            longest = texts[7]  # all lanes go together
            assert np.array_equal(encoder.begin(longest.input()).result()[0], alone[7])


def test_every_thread_may_run_forwards(amx: Opener) -> None:
    texts = make_texts([40, 3])
    with amx(2) as library, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        encoder = CpuEncoder(library, make_spec(SHAPES[0]), Format.DOT)
        first, second = (
            thread.submit(lambda: encoder.begin(texts.input()).result()).result()[0] for thread in (one, other)
        )
        assert np.array_equal(first, second)


def test_self_check_accepts_every_library(library: CpuLibrary) -> None:
    assert has_exact_products(library)


@pytest.mark.parametrize("form", [Format.DOT, Format.INT8], ids=lambda form: form.name)
def test_self_check_detects_one_wrong_value(form: Format, amx: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    product = CpuLibrary.product

    def wrong(self, packed, x_RD, add=None):
        result = product(self, packed, x_RD, add)
        if packed.struct.format == form and len(x_RD) == 17:
            result[16, -1] += 1
        return result

    monkeypatch.setattr(CpuLibrary, "product", wrong)
    with amx(1) as library:
        assert not has_exact_products(library)
