"""Times kernels/maxsim: the chosen backend beside the reference, for rerank requests. Best microseconds.

.venv/bin/python benchmarks/kernels/bench_maxsim.py --output benchmarks/results/maxsim-cpu.json
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, load_module, parse_arguments, report, require_green_tests

from penstock.kernels.maxsim import maxsim

# Name, tokens of the query, tokens of each document, width.
CASES = (
    ("rerank_10", 32, (180,) * 10, 128),
    ("rerank_100", 32, (60, 120, 180, 240) * 25, 128),
    ("long", 32, (8192,), 1024),
)


def main() -> None:
    """Measures every case, in every dtype asked for."""
    args = parse_arguments(__doc__)
    require_green_tests("test_maxsim.py")
    reference = load_module("references").maxsim_reference
    rows = []
    for name, query_len, document_lens, width in CASES:
        for dtype in args.dtype:
            generator = torch.Generator().manual_seed(0)
            queries, documents = (
                torch.randn(n, width, generator=generator).to(getattr(torch, dtype)).to(args.device)
                for n in (query_len, sum(document_lens))
            )
            lengths = {
                "query_lens": (query_len,),
                "document_lens": document_lens,
                "query_of": (0,) * len(document_lens),
            }
            calls = {
                name: partial(function, queries, documents, **lengths)
                for name, function in (("reference", reference), ("chosen", maxsim))
            }
            times_us = alternate(calls, args.seconds, args.device)
            rows.append(
                {
                    "case": name,
                    "dtype": dtype,
                    "reference_us": times_us["reference"],
                    "chosen_us": times_us["chosen"],
                    "times_faster": times_us["reference"] / times_us["chosen"],
                }
            )
    report(rows, args)


if __name__ == "__main__":
    main()
