"""Times attention in slices over a paged cache beside the same sequence whole. Best microseconds; GFLOP/s of the whole.

Everything that slices cost is counted: keys and values are stored, blocks are read. The whole stores nothing.

.venv/bin/python benchmarks/kernels/bench_paged_attention.py --output benchmarks/results/paged-attention-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_cases, parse_arguments, report, require_green_tests
from torch import Tensor

from penstock.kernels.attention import attention, attention_paged
from penstock.kernels.kv_store import kv_store


def main() -> None:
    """Measures one causal sequence: whole, and in slices of two sizes over neighbouring and over scattered blocks."""
    args = parse_arguments(__doc__)
    require_green_tests("test_attention.py", "test_paged_attention.py", "test_kv_store.py")
    cases = load_cases()
    rows = []
    with torch.inference_mode():
        for case in cases.PAGED_BENCH_CASES:
            for dtype in args.dtype:
                inputs = cases.make_attention_inputs(case, getattr(torch, dtype), args.device)
                candidates = {"whole": partial(attend_whole, inputs)}
                if args.with_sdpa:
                    candidates["sdpa"] = partial(attend_whole, inputs, backend="sdpa")
                for chunk_size in (256, 2048):
                    for is_scattered in (False, True):
                        cache = cases.make_block_table(sum(case.seq_lens), 16, is_scattered=is_scattered)
                        name = f"{chunk_size}_scattered" if is_scattered else str(chunk_size)
                        candidates[name] = partial(Sliced(inputs, cache, 16), chunk_size)
                times_us = alternate(candidates, args.seconds, args.device)
                length = sum(case.seq_lens)
                flops = 2 * case.num_heads * case.head_size * length * (length + 1)
                rows.append(
                    {
                        "case": case.name,
                        "dtype": dtype,
                        "whole_us": times_us["whole"],
                        "gflop_per_s": flops / times_us["whole"] / 1e3,
                        **{
                            f"{name}_ratio": time_us / times_us["whole"]
                            for name, time_us in times_us.items()
                            if name != "whole"
                        },
                    }
                )
    report(rows, args)
