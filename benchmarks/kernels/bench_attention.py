"""Times kernels/attention: the chosen backend beside SDPA. Best microseconds; unpadded GFLOP/s.

.venv/bin/python benchmarks/kernels/bench_attention.py --output benchmarks/results/attention-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_cases, parse_arguments, report, require_green_tests

from penstock.kernels.attention import attention


def main() -> None:
    """Measures full attention as an encoder layer calls it: q, k and v are chunks of one product."""
    args = parse_arguments(__doc__)
    require_green_tests("test_attention.py")
    cases = load_cases()
    rows = []
    with torch.inference_mode():
        for case in cases.ATTENTION_BENCH_CASES:
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
