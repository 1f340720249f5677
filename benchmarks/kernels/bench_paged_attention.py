"""Times attention in chunks over a paged cache beside the whole sequence. Best microseconds; GFLOP/s of the whole.

Everything that chunks cost is counted: keys and values are stored, blocks are read. The whole stores nothing.

.venv/bin/python benchmarks/kernels/bench_paged_attention.py --output benchmarks/results/paged-attention-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_module, parse_arguments, report, require_green_tests
from torch import Tensor

from penstock.kernels.attention import Backend, attention, attention_paged

BLOCK_SIZE = 16
CHUNK_SIZES = (256, 2048)
LENGTHS = {"8k": 8192, "32k": 32768}


def main() -> None:
    """Measures one causal sequence: whole, and in chunks over neighbouring and over scattered blocks."""
    args = parse_arguments(__doc__)
    require_green_tests("test_attention.py")
    cases = load_module("cases")
    rows = []
    with torch.inference_mode():
        for name, length in LENGTHS.items():
            case = cases.AttentionCase(name, (length,), 8, 2, 64)
            for dtype in args.dtype:
                q, k, v = (
                    torch.randn(length, heads, case.head_size).to(getattr(torch, dtype)).to(args.device)
                    for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
                )
                candidates = {"whole": partial(attend, q, k, v), "sdpa": partial(attend, q, k, v, "sdpa")}
                for chunk_size in CHUNK_SIZES:
                    for is_scattered in (False, True):
                        blocks = cases.make_block_table(-(-length // BLOCK_SIZE), is_scattered)
                        caches = torch.zeros(2, int(blocks.max()) + 1, BLOCK_SIZE, *k.shape[1:]).to(k)
                        kind = f"{chunk_size}_scattered" if is_scattered else str(chunk_size)
                        candidates[kind] = partial(attend_sliced, q, k, v, caches, blocks, chunk_size)
                # A run of the longest case takes seconds.
                times_us = alternate(candidates, args.seconds, args.device, num_warmups=1, min_runs=3)
                whole_us = times_us.pop("whole")
                flops = 2 * case.num_heads * case.head_size * length * (length + 1)
                rows.append(
                    {
                        "case": case.name,
                        "dtype": dtype,
                        "whole_us": whole_us,
                        "gflop_per_s": flops / whole_us / 1e3,
                        **{f"{kind}_to_whole": f"{time_us / whole_us:.3f}" for kind, time_us in times_us.items()},
                    }
                )
    report(rows, args)


def attend(q: Tensor, k: Tensor, v: Tensor, backend: Backend | None = None) -> Tensor:
    """The sequence in one piece."""
    length = len(q)
    return attention(
        q,
        k,
        v,
        torch.tensor([0, length], dtype=torch.int32, device=q.device),
        [length],
        max_seqlen=length,
        scale=q.shape[2] ** -0.5,
        is_causal=True,
        backend=backend,
    )


def attend_sliced(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, blocks: Tensor, chunk_size: int) -> Tensor:
    """The sequence in chunks as the engine runs them: the first has no past."""
    k_cache, v_cache = caches
    slots = (blocks[:, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(q.device)
    out = torch.empty_like(q)
    for start in range(0, len(q), chunk_size):
        rows = slice(start, min(start + chunk_size, len(q)))
        count = rows.stop - start
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots[rows], x[rows])
        if start == 0:
            out[rows] = attend(q[rows], k[rows], v[rows])
            continue
        out[rows] = attention_paged(
            q[rows],
            k_cache,
            v_cache,
            blocks[None],
            torch.tensor([0, count], dtype=torch.int32, device=q.device),
            [count],
            [start],
            scale=q.shape[2] ** -0.5,
        )
    return out


if __name__ == "__main__":
    main()
