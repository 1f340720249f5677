"""Times kernels/pooling: the chosen backend beside the reference, with the inputs of the tests. Best microseconds.

.venv/bin/python benchmarks/kernels/bench_pooling.py --output benchmarks/results/pooling-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_module, parse_arguments, report, require_green_tests

from penstock.kernels.pooling import pool

QUERY = (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20)
CASES = (
    ("query", QUERY, 384),
    ("mixed", tuple(range(8, 200, 6)), 384),
    ("long", (200, 212, 230, 236, 244, 250, 262, 280), 384),
    ("short_512", (8,) * 512, 384),
    ("one_8192", (8192,), 1024),
)
"""Names, lengths of sequences, and widths."""


def main() -> None:
    """Measures mean, max and cls pooling with normalisation, in every dtype asked for."""
    args = parse_arguments(__doc__)
    require_green_tests("test_pooling.py")
    cases, references = load_module("cases"), load_module("references")
    rows = []
    for case in (cases.PoolingCase(*sizes) for sizes in CASES):
        for dtype in args.dtype:
            inputs = cases.make_pooling_inputs(case, getattr(torch, dtype), args.device)
            for kind in ("mean", "max", "cls"):
                arguments = (inputs.hidden_states, inputs.cu_seqlens, kind)
                calls = {
                    "reference": partial(references.pool_reference, *arguments, normalize=True),
                    "chosen": partial(pool, *arguments, normalize=True, max_seqlen=max(case.seq_lens)),
                }
                times_us = alternate(calls, args.seconds, args.device)
                read_bytes = inputs.hidden_states.nbytes if kind != "cls" else 0
                rows.append(
                    {
                        "case": case.name,
                        "dtype": dtype,
                        "pooling": kind,
                        "reference_us": times_us["reference"],
                        "chosen_us": times_us["chosen"],
                        "times_faster": times_us["reference"] / times_us["chosen"],
                        "gb_per_s": read_bytes / times_us["chosen"] / 1e3,
                    }
                )
    report(rows, args)


if __name__ == "__main__":
    main()
