"""Computes results of the C library for test_arm64.py: python -m kernels.cpu.results FILE.

Runs on emulated processors without torch. Run it with tests/ on PYTHONPATH.
"""

import sys
from pathlib import Path

import numpy as np

from penstock.kernels.cpu import ActivationCode, CpuEncoder, CpuLibrary, Format, PoolingCode

from .chunked import ChunkedDecoder
from .specs import DECODERS, SHAPES, Floats, format_pairs, make_spec, make_texts

# Inputs, outputs and rows of products: parts of tiles, of panels, and of pairs of rows and of inputs.
SIZES = ((1, 1, 1), (3, 17, 2), (4, 16, 13), (6, 33, 7), (17, 5, 6), (44, 70, 12), (48, 312, 11), (384, 48, 205))
LENGTHS = [70, 3, 1, 17]


def uniform(numbers: np.random.Generator, *shape: int) -> Floats:
    """Numbers from -1 to 1 with the same bits on every processor."""
    return 2 * numbers.random(shape, np.float32) - 1


def product_inputs(num_in: int, num_out: int, num_rows: int) -> tuple[Floats, ...]:
    """Rows, weights, bias, and values to add."""
    numbers = np.random.default_rng(num_in)
    shapes = (num_rows, num_in), (num_out, num_in), (num_out,), (num_rows, num_out)
    return tuple(uniform(numbers, *shape) for shape in shapes)


def activation_inputs() -> Floats:
    """Floats of every size, inf and NaN."""
    sizes = np.geomspace(1e-38, 3e38, 501, dtype=np.float32)
    fine = np.linspace(-20, 20, 1001, dtype=np.float32)
    return np.concatenate([fine, sizes, -sizes, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])])


def compute(library: CpuLibrary) -> dict[str, Floats]:
    """Returns results by name.

    Raises:
        ArithmeticError: The bits of a row depend on its batch or on chunks.
    """
    return _products(library) | _activations(library) | _forwards(library) | _pooled(library)


def _products(library: CpuLibrary) -> dict[str, Floats]:
    results = {}
    for form in library.formats:
        for sizes in SIZES:
            x, weight, bias, add = product_inputs(*sizes)
            packed = library.pack(weight, bias, form)
            name = f"{form.name} {sizes}"
            results[name] = library.product(packed, x, add)
            for count in range(1, min(len(x), 14)):
                _check_equal(name, library.product(packed, x[-count:], add[-count:]), results[name][-count:])
    return results


def _activations(library: CpuLibrary) -> dict[str, Floats]:
    x, results = activation_inputs()[:, None], {}
    for activation in ActivationCode:
        packed = library.pack(np.ones((1, 1), np.float32), None, Format.F32, activation=activation)
        results[activation.name] = library.product(packed, x)[:, 0]
    return results


def _forwards(library: CpuLibrary) -> dict[str, Floats]:
    results, texts = {}, make_texts(LENGTHS)
    for shape in (*SHAPES, *DECODERS):
        spec = make_spec(shape)
        for form, attention in format_pairs(library):
            encoder = CpuEncoder(library, spec, form, attention_format=attention)
            name = f"{shape.name} {form.name} {attention.name}"
            rows = results[name] = encoder.begin(texts.input()).result()[0]
            alone = texts[3]
            _check_equal(name, encoder.begin(alone.input()).result()[0], rows[-LENGTHS[3] :])
            if shape.is_decoder and shape.window is not None and shape.window[1] == 0:
                _check_equal(name, ChunkedDecoder(encoder, spec, texts, 16).run(33), rows)
    return results


def _pooled(library: CpuLibrary) -> dict[str, Floats]:
    rows, weights = uniform(np.random.default_rng(0), 91, 35), np.abs(uniform(np.random.default_rng(1), 91))
    starts, lengths = np.array([0, 70, 73], np.int32), np.array([70, 3, 18], np.int32)
    return {
        f"pool {kind.name}": library.pool(
            rows,
            starts,
            lengths,
            kind,
            width=33,
            dimensions=np.array([33, 7, 16], np.int32),
            normalize=np.array([0, 1, 1], np.uint8),
            skips=np.array([0, 1, 0], np.int32),
            weights=weights if kind is PoolingCode.WEIGHTED else None,
        )
        for kind in PoolingCode
    }


def _check_equal(name: str, part: Floats, whole: Floats) -> None:
    if not np.array_equal(part, whole):
        raise ArithmeticError(f"{name}: a part differs from the whole")


if __name__ == "__main__":
    with CpuLibrary(2) as opened:
        np.savez(Path(sys.argv[1]), isa=opened.isa, formats=list(opened.formats), **compute(opened))
