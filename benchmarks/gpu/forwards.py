"""Forwards of encoders: each variant at each number of tokens, beside float32 on the CPU, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from penstock.engine.executors.torch.layers.weights import Fusion
from penstock.engine.executors.torch.packed_batch import PackedBatch, PackedModel
from penstock.engine.executors.torch.spec_model import Layer, SpecModel
from penstock.kernels.pooling import pool

from .made_models import load_made, pack
from .phases import NEEDS_CUDA, Bench, Row, attempt
from .shapes import OWN_VARIANTS, SHAPES, TINY_SHAPES, USUAL_LENGTH, Shape, equal_lengths, mixed_lengths

Forward = Callable[[], Tensor]
Prepare = Callable[[], Forward]

_TOKENS: Final = (16_384, 4_096, 65_536, 1_024)
"""The most telling ones first, as the phase may run out of time."""
_MAX_GRAPH_TOKENS: Final = 4_096
_LENGTHS_COMPARED: Final = [128, 40, 1]
_KERNELS_SHOWN: Final = 12


def measure(bench: Bench) -> Iterator[Row]:
    """Yields cosines, rates by shape, variant, mix of lengths and number of tokens, and tables of kernels."""
    for names in (OWN_VARIANTS, ("compile",)):  # torch's compiler may take all the time that is left
        for shape in bench.pick(SHAPES, TINY_SHAPES):
            exact = None
            for name in names:
                row = {"shape": shape.name, "variant": name}
                if name == "fused" and not bench.is_cuda:
                    yield {"name": "forward", **row, "skipped": NEEDS_CUDA}
                    continue
                model = variant(name, shape, bench)
                exact = exact_rows(shape, bench) if exact is None else exact
                yield attempt({"name": "cosine", **row}, partial(compare, model, shape, exact, bench))
                for num_tokens in bench.pick(_TOKENS, (96, 32)):
                    yield from rates(shape, name, model, num_tokens, bench)
                yield attempt({"name": "kernels", **row}, partial(kernels_of, shape, model, bench))


def run(model: PackedModel, batch: PackedBatch) -> Tensor:
    """A forward and its pooling, as an embedding model answers: [N, D] unit rows, float32."""
    hidden = model.forward(batch).hidden_states
    longest = max(batch.seq_lens)
    return pool(hidden, batch.cu_seqlens, "mean", normalize=True, max_seqlen=longest)


def _same(forward: Forward) -> Forward:
    return forward


def captured(forward: Forward) -> Forward:
    """Returns the replay of a forward as a CUDA graph. The next replay overwrites its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = forward()

    def replay() -> Tensor:
        graph.replay()
        return rows

    return replay


def variant(name: str, shape: Shape, bench: Bench) -> PackedModel:
    """Returns the model in one of the ways of running it that are chosen as it is loaded."""
    if name == "compile":
        return compiled(load_made(shape, bench, fusion=Fusion.NONE), bench)
    return load_made(shape, bench, fusion=Fusion(name))


def compiled(model: PackedModel, bench: Bench) -> PackedModel:
    """Returns the model with `Layer.after_attention` compiled by torch, one function for all layers.

    A trial of the code (`--tiny`) traces the function and does not compile it.
    """
    between = torch.compile(Layer.after_attention, dynamic=True, backend=bench.pick("inductor", "eager"))
    assert isinstance(model, SpecModel)
    for layer in model.layers:
        layer.after_attention = partial(between, layer)  # type: ignore[method-assign]
    return model


def exact_rows(shape: Shape, bench: Bench) -> Tensor:
    """The rows of float32 on the CPU."""
    return run(load_made(shape, bench, device="cpu", dtype="float32"), pack(compared(shape), torch.device("cpu")))


def compared(shape: Shape) -> list[int]:
    """Returns the lengths of the compared texts."""
    return [min(length, shape.max_tokens) for length in _LENGTHS_COMPARED]


def compare(model: PackedModel, shape: Shape, exact: Tensor, bench: Bench) -> Row:
    """Returns the least cosine with the rows of float32."""
    rows = run(model, pack(compared(shape), bench.device)).cpu()
    return {"cosine": torch.cosine_similarity(rows, exact).min().item()}


def rates(shape: Shape, variant: str, model: PackedModel, num_tokens: int, bench: Bench) -> Iterator[Row]:
    """Yields the rate with that many tokens, in texts of one length and of ShareGPT's; small batches as a graph too."""
    usual = min(USUAL_LENGTH.get(shape.name, shape.max_tokens), shape.max_tokens)
    mixes = {
        f"equal {usual}": equal_lengths(num_tokens, usual),
        "sharegpt": mixed_lengths(num_tokens, shape.max_tokens),
    }
    for mix, lengths in mixes.items():
        forward = partial(run, model, pack(lengths, bench.device))
        yield row_of(shape, variant, mix, lengths, partial(_same, forward), bench)
        if num_tokens <= _MAX_GRAPH_TOKENS:
            name = f"{variant}, graph"
            if bench.is_cuda:
                yield row_of(shape, name, mix, lengths, partial(captured, forward), bench)
            else:
                yield {"name": "forward", "shape": shape.name, "variant": name, "skipped": NEEDS_CUDA}


def row_of(shape: Shape, variant: str, mix: str, lengths: list[int], prepare: Prepare, bench: Bench) -> Row:
    """Measures one forward; gaps between its launches count."""

    def measured() -> Row:
        time_us = bench.median_us(prepare(), head_start=False)
        return {
            "ms": time_us / 1e3,
            "tokens_per_s": 1e6 * sum(lengths) / time_us,
            "tflop_per_s": shape.operations(lengths) / time_us / 1e6,
        }

    row = {"name": "forward", "shape": shape.name, "variant": variant, "lengths": mix, "tokens": sum(lengths)}
    return attempt(row, measured)


def kernels_of(shape: Shape, model: PackedModel, bench: Bench) -> Row:
    """Returns the kernels of a forward that take the most time, from the profiler."""
    if not bench.is_cuda:
        return {"skipped": NEEDS_CUDA}
    forward = partial(run, model, pack(equal_lengths(_TOKENS[0], USUAL_LENGTH[shape.name]), bench.device))
    forward()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        forward()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    table: dict[str, list[float]] = {}
    for event in on_device:
        table.setdefault(event.name[:80], []).append(event.time_range.elapsed_us())
    ranked = sorted(table.items(), key=lambda item: -sum(item[1]))[:_KERNELS_SHOWN]
    return {
        "launches": len(on_device),
        "busy_us": sum(event.time_range.elapsed_us() for event in on_device),
        "top": [{"kernel": name, "runs": len(times), "us": sum(times)} for name, times in ranked],
    }
