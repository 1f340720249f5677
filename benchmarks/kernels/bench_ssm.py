"""Times the kernels of state space models beside transformers' torch code on the same packed batch, padded for it.

.venv/bin/python benchmarks/kernels/bench_ssm.py --output benchmarks/results/ssm-cpu.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from measure import alternate, load_module, parse_arguments, report, require_green_tests
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d
from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

# The tokens of sequences; the sizes are those of mamba-130m and mamba2-130m.
SEQ_LENS: dict[str, tuple[int, ...]] = {
    "one_2048": (2048,),
    "equal_64": (64,) * 32,
    "mixed": tuple(range(8, 200, 6)),
    "query": (8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20),
}


def main() -> None:
    """Measures whole sequences without states, as a model without a cache runs them, in microseconds per true token."""
    args = parse_arguments(__doc__)
    require_green_tests("test_recurrent.py")
    cases = load_module("cases")
    rows = []
    with torch.inference_mode():
        for name, seq_lens in SEQ_LENS.items():
            for dtype in args.dtype:
                for operation, make in OPERATIONS.items():
                    candidates = make(cases, seq_lens, getattr(torch, dtype), args.device)
                    times_us = alternate(candidates, args.seconds, args.device)
                    rows.append(
                        {
                            "operation": operation,
                            "case": name,
                            "dtype": dtype,
                            "transformers_us": times_us["transformers"] / sum(seq_lens),
                            "chosen_us": times_us["chosen"] / sum(seq_lens),
                            "times_faster": times_us["transformers"] / times_us["chosen"],
                            "tokens_per_s": sum(seq_lens) / times_us["chosen"] * 1e6,
                        }
                    )
    report(rows, args)


def _convolutions(
    cases: ModuleType, seq_lens: tuple[int, ...], dtype: torch.dtype, device: str
) -> dict[str, Callable[[], Any]]:
    """The convolution of mamba2-130m."""
    inputs = cases.make_conv_inputs(cases.ConvCase("", seq_lens, 1792), dtype, device)
    x = _padded(inputs.x, seq_lens).transpose(1, 2)
    weight, longest = inputs.weight[:, None], max(seq_lens)

    def run_torch() -> Tensor:
        return F.silu(F.conv1d(x, weight, inputs.bias, padding=3, groups=1792)[..., :longest])

    arguments = (inputs.x, inputs.weight, inputs.bias, inputs.cu_seqlens, seq_lens)
    return {"transformers": run_torch, "chosen": partial(causal_conv1d, *arguments, activation="silu")}


def _scans(
    cases: ModuleType, seq_lens: tuple[int, ...], dtype: torch.dtype, device: str
) -> dict[str, Callable[[], Any]]:
    """The recurrence of mamba-130m."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    inputs = cases.make_scan_inputs(cases.ScanCase("", seq_lens, 1536, 16), dtype, device)
    x, dt, b, c = (_padded(v, seq_lens).transpose(1, 2) for v in (inputs.x, inputs.dt, inputs.b, inputs.c))
    arguments = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.cu_seqlens, seq_lens)
    return {
        "transformers": partial(mamba_selective_scan, x, dt, inputs.a, b, c, D=inputs.d.to(dtype)),
        "chosen": partial(selective_scan, *arguments, d=inputs.d),
    }


def _dualities(
    cases: ModuleType, seq_lens: tuple[int, ...], dtype: torch.dtype, device: str
) -> dict[str, Callable[[], Any]]:
    """The recurrence of mamba2-130m."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    inputs = cases.make_ssd_inputs(cases.SsdCase("", seq_lens, 24, 64, 1, 128), dtype, device)
    x, dt, b, c = (_padded(v, seq_lens) for v in (inputs.x, inputs.dt, inputs.b, inputs.c))
    arguments = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.cu_seqlens, seq_lens)
    return {
        "transformers": partial(mamba2_chunk_scan, x, dt, inputs.a, b, c, 256, D=inputs.d),
        "chosen": partial(ssd, *arguments, d=inputs.d),
    }


OPERATIONS = {"causal_conv1d": _convolutions, "selective_scan": _scans, "ssd": _dualities}


def _padded(rows: Tensor, seq_lens: tuple[int, ...]) -> Tensor:
    """[N, L, ...]: the packed rows with zeros behind short sequences."""
    return torch.nn.utils.rnn.pad_sequence(list(rows.split(list(seq_lens))), batch_first=True)


if __name__ == "__main__":
    main()
