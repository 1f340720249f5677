"""Times kernels/attention: the chosen backend beside SDPA. Best microseconds; unpadded GFLOP/s.

.venv/bin/python benchmarks/kernels/bench_attention.py --output benchmarks/results/attention-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_module, parse_arguments, report, require_green_tests

from penstock.kernels.attention import attention

QUERY = (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20)
MIXED = tuple(range(8, 200, 6))
LONG = (200, 212, 230, 236, 244, 250, 262, 280)
CASES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("query", QUERY, 32),
    ("one_query", (12,), 32),
    ("mixed", MIXED, 32),
    ("long", LONG, 32),
    ("equal_250", (250,) * 32, 32),
    ("base_query", QUERY, 64),
    ("base_mixed", MIXED, 64),
    ("base_long", LONG, 64),
    ("base_512", (512,) * 4, 64),
)
"""Names, lengths of sequences, and sizes of heads."""


def main() -> None:
    """Measures full attention as an encoder layer calls it: q, k and v are chunks of one product."""
    args = parse_arguments(__doc__)
    require_green_tests("test_attention.py")
    cases = load_module("cases")
    rows = []
    with torch.inference_mode():
        for case in (cases.AttentionCase(name, lengths, head_size=size) for name, lengths, size in CASES):
            for dtype in args.dtype:
                inputs = cases.make_attention_inputs(case, getattr(torch, dtype), args.device)
                run = partial(
                    attention,
                    inputs.q,
                    inputs.k,
                    inputs.v,
                    inputs.cu_seqlens,
                    case.seq_lens,
                    max_seqlen=max(case.seq_lens),
                    # Folded into the query weights.
                    scale=1.0,
                )
                candidates = {"sdpa": partial(run, backend="sdpa"), "chosen": run}
                times_us = alternate(candidates, args.seconds, args.device)
                flops = 4 * case.num_heads * case.head_size * sum(length**2 for length in case.seq_lens)
                rows.append(
                    {
                        "case": case.name,
                        "dtype": dtype,
                        **{f"{name}_us": time_us for name, time_us in times_us.items()},
                        "faster_than_sdpa": times_us["sdpa"] / times_us["chosen"],
                        "gflop_per_s": flops / times_us["chosen"] / 1e3,
                    }
                )
    report(rows, args)


if __name__ == "__main__":
    main()
