"""Runs forwards, products and pooling of random sizes with a sanitized library: python -m kernels.cpu.fuzz LIBRARY.

Run it with tests/ on PYTHONPATH. Other tests check the results.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

from penstock.kernels.cpu import ActivationCode, CpuEncoder, CpuKernelError, CpuLibrary, Format, OutputRows

from .chunked import ChunkedDecoder
from .specs import DECODERS, LONGEST, SHAPES, format_pairs, make_spec, make_texts

ISAS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "neonmmla", "neondot", "neon", "plain")
NUM_ROUNDS = 3


def main(path: Path) -> None:
    """Runs rounds on each instruction set of this processor."""
    done = 0
    for isa in ISAS:
        try:
            library = CpuLibrary(3, isa=isa, path=path)
        except CpuKernelError as error:
            print(error)
            continue
        with library:
            for seed in range(NUM_ROUNDS):
                numbers = np.random.default_rng(seed)
                encode(path, isa, numbers)
                multiply(library, numbers)
                pool(library, numbers)
        done += NUM_ROUNDS
    print(f"{done} rounds")


def encode(path: Path, isa: str, numbers: np.random.Generator) -> None:
    """Runs each shape in each format on a new library. Short texts come first, so that memory is small."""
    for shape, form in itertools.product((*SHAPES, *DECODERS), Format):
        with CpuLibrary(int(numbers.integers(1, 6)), isa=isa, path=path) as library:
            if form not in library.formats:
                continue
            spec = make_spec(shape)
            attention = numbers.choice([of for products, of in format_pairs(library) if products is form])
            encoder = CpuEncoder(library, spec, form, attention_format=Format(attention))
            for max_length in (4, 60, LONGEST):
                num_seqs = numbers.integers(1, 4 if max_length > 60 else 12)
                lengths = numbers.integers(1, max_length + 1, num_seqs).tolist()
                hides, weighs = (not shape.is_decoder and numbers.random() < 0.5 for _ in range(2))
                texts = make_texts(lengths, int(numbers.integers(100)), hides=hides)
                rows, _ = encoder.begin(texts.input(), need_attention=weighs).result()
                output_rows, starts = OutputRows(int(numbers.integers(1, 3))), texts.starts
                pooled, _ = encoder.begin(texts.input(), output_rows=output_rows).result()
                if not np.array_equal(pooled, rows[starts[:-1] if output_rows is OutputRows.FIRST else starts[1:] - 1]):
                    raise ArithmeticError(f"{library.isa}, {shape}, {form.name}: kept rows differ from all rows")
                if not np.isfinite(rows).all():
                    raise ArithmeticError(f"{library.isa}, {shape}, {form.name}, {lengths}: not finite")
                if shape.is_decoder and shape.window is not None and shape.window[1] == 0:
                    chunked = ChunkedDecoder(encoder, spec, texts, int(numbers.integers(1, 40)))
                    if not np.array_equal(rows, chunked.run(int(numbers.integers(1 if max_length < 9 else 60, 300)))):
                        raise ArithmeticError(f"{library.isa}, {shape}, {form.name}: chunks differ from the whole")


def multiply(library: CpuLibrary, numbers: np.random.Generator) -> None:
    """Products of all formats and activations, with some NaN and inf."""
    for form in library.formats:
        for activation in ActivationCode:
            for gated in (False, True):
                num_in, num_out = numbers.integers(1, 130, 2)
                weight = numbers.standard_normal((2 * num_out if gated else num_out, num_in), np.float32)
                packed = library.pack(weight, None, form, activation=activation, gated=gated)
                x = numbers.standard_normal((numbers.integers(1, 230), num_in), np.float32)
                x[numbers.random(x.shape) < 0.01] = numbers.choice(np.float32([np.nan, np.inf, 1e38, 1e-40]))
                library.product(packed, x)
                weight[0, 0] = numbers.choice(np.float32([np.nan, np.inf, 3e38, 1e-40]))
                library.pack(weight, weight[:, 0], Format(form), activation=activation, gated=gated)


def pool(library: CpuLibrary, numbers: np.random.Generator) -> None:
    """All kinds of pooling, with some empty sequences, NaN and inf."""
    for kind in range(7):
        for width in numbers.integers(1, 200, 6).tolist():
            lengths = numbers.integers(0, 90, 7).astype(np.int32)
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
            rows = numbers.standard_normal((int(lengths.sum()), width), np.float32)
            rows[numbers.random(rows.shape) < 0.001] = numbers.choice(np.float32([np.nan, np.inf, -np.inf]))
            library.pool(
                rows,
                starts,
                lengths,
                kind,
                width=int(numbers.integers(1, width + 1)),
                dimensions=numbers.integers(1, width + 1, 7).astype(np.int32),
                normalize=numbers.integers(0, 2, 7).astype(np.uint8),
                skips=numbers.integers(0, 4, 7).astype(np.int32),
                weights=numbers.random(len(rows), np.float32) if kind == 6 else None,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
