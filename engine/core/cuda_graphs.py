"""CUDA graphs: forwards of small batches are captured once per bucket and replayed with one launch.

A captured forward has the rows and sequences of its bucket. Its kernels read tensors at fixed addresses: ids, positions
and types of the rows, and the boundaries of the sequences. A batch is copied to their front. The other rows are padding
with token 0 at position 0, and the other boundaries equal the last one, so the other sequences are empty. Only
attention and pooling mix rows, and both stay within a sequence: padding rows, NaN included, are never read.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..executors.torch.packed_batch import ModelOutput, PackedBatch, PackedModel
from ..protocol.config import SchedulerConfig
from ..protocol.model_info import ModelInfo
from .warm_up import SampleBatches

logger = logging.getLogger("penstock.engine")

_MAX_TOKENS: Final = 4096
"""Tokens. The kernels of larger batches take longer to run than to launch one by one."""
_TOKENS: Final = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SEQS: Final = (8, 32, 128, 512)
_MIN_MEAN: Final = 4
"""Tokens. Minimum of the mean sequence length of a bucket, which limits its number of sequences."""
_SPREAD: Final = 16
"""Longest sequence of a bucket divided by the mean. A larger ratio launches too many programs of empty sequences."""
_MIN_LONGEST: Final = 128
"""Tokens: a tile of attention. A shorter limit saves no time."""
_SIZES_TRIED: Final = 3
"""Number of sizes to search for a bucket. A batch of many short sequences may need more than the smallest size."""
_TOLERANCE: Final = 0.05
"""Allowed difference of a replay, relative to the largest value: matrix products of other sizes round differently."""


class Bucket(NamedTuple):
    """Size of a captured forward.

    Attributes:
        num_tokens: Rows.
        num_seqs: Sequences, including empty ones.
        max_seqlen: Most tokens of a sequence.
    """

    num_tokens: int
    num_seqs: int
    max_seqlen: int

    def seq_lens(self) -> tuple[int, ...]:
        """Returns `num_seqs` lengths that sum up to `num_tokens`, the longest first."""
        lengths = []
        left = self.num_tokens
        for _ in range(self.num_seqs):
            lengths.append(min(self.max_seqlen, left))
            left -= lengths[-1]
        return tuple(lengths)


class BucketTable:
    """The buckets of one model.

    Args:
        max_tokens: Tokens of the largest bucket.
    """

    def __init__(self, max_tokens: int, max_model_len: int, max_num_seqs: int) -> None:
        self._sizes = [size for size in _TOKENS if size <= max_tokens]
        self._by_size = {size: _buckets_of(size, max_model_len, max_num_seqs) for size in self._sizes}

    def all(self) -> list[Bucket]:
        """Returns all buckets, the largest first."""
        return [bucket for size in reversed(self._sizes) for bucket in reversed(self._by_size[size])]

    def find(self, num_tokens: int, num_seqs: int, max_seqlen: int) -> Bucket | None:
        """Returns the smallest bucket for a batch; None if no bucket of about its size fits."""
        first = bisect_left(self._sizes, num_tokens)
        for size in self._sizes[first : first + _SIZES_TRIED]:
            for bucket in self._by_size[size]:
                if num_seqs <= bucket.num_seqs:
                    return bucket if max_seqlen <= bucket.max_seqlen else None
        return None


def _buckets_of(num_tokens: int, max_model_len: int, max_num_seqs: int) -> list[Bucket]:
    """Returns the buckets of `num_tokens` tokens, ordered by number of sequences."""
    found = []
    for index, num_seqs in enumerate(_SEQS):
        if index and (num_seqs * _MIN_MEAN > num_tokens or _SEQS[index - 1] >= max_num_seqs):
            break
        longest = max(_SPREAD * num_tokens // num_seqs, _MIN_LONGEST)
        bucket = Bucket(num_tokens, num_seqs, min(longest, num_tokens, max_model_len))
        if num_seqs * bucket.max_seqlen >= num_tokens:
            found.append(bucket)
    return found


class CudaRecorder:
    """Captures CUDA graphs. They share memory: read the result of a replay before the next replay starts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs a function and captures the kernels that it launches.

        Args:
            run: Reads tensors at fixed addresses. The launched kernels must not depend on their values.

        Returns:
            A function that launches the kernels again, and their output tensor.

        Raises:
            RuntimeError: The function waits for the device, memory is short, or the device is lost.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            # A failed capture may leave its stream current; this context restores the previous one.
            with torch.cuda.stream(current):
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    run()  # compiles kernels and allocates workspaces, which must not happen during the capture
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # thread_local: other threads of this process may use CUDA during the capture.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = run()
        return graph.replay, out

    def wait(self) -> None:
        """Waits for the device to finish. Raises torch.AcceleratorError if it is lost."""
        torch.cuda.synchronize(self._device)


class _Graph(NamedTuple):
    replay: Callable[[], None]
    hidden_states: Tensor  # [bucket.num_tokens, D]


class ForwardGraphs:
    """Runs an encoder: small batches replay a captured forward, others run the model.

    Args:
        model: The encoder. Its forward depends only on the rows and boundaries of a batch and does not wait for the
            device.
    """

    def __init__(self, model: PackedModel, recorder: CudaRecorder, buckets: BucketTable, device: torch.device) -> None:
        self._model = model
        self._recorder = recorder
        self._buckets = buckets
        self._graphs: dict[Bucket, _Graph] = {}
        num_tokens = max((bucket.num_tokens for bucket in buckets.all()), default=0)
        num_seqs = max((bucket.num_seqs for bucket in buckets.all()), default=0)
        self._rows = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)  # ids, positions, types
        self._cu_seqlens = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def record(self, make_batch: Callable[[Sequence[int]], PackedBatch]) -> int:
        """Captures every bucket and compares a replay of another batch with the model.

        If a capture fails or a replay differs, logs a warning and discards all graphs.

        Args:
            make_batch: Builds a batch of sequences with the given lengths.

        Returns:
            The number of graphs.

        Raises:
            torch.AcceleratorError: The device is lost.
        """
        began_s = time.monotonic()
        try:
            for bucket in self._buckets.all():
                self._graphs[bucket] = self._record(bucket, make_batch)
                if not self._is_right(bucket, make_batch):
                    raise RuntimeError(f"a replay of {bucket.num_tokens} tokens differs from the forward")
        except RuntimeError as error:
            self._graphs.clear()
            # torch raises the same type of error for a failed capture and for a lost device. On a lost device this
            # forward fails, too.
            self._model.forward(make_batch([1]))
            self._recorder.wait()
            logger.warning("small batches run without CUDA graphs: %s", str(error).partition("\n")[0])
            return 0
        seconds = time.monotonic() - began_s
        logger.info("recorded %d CUDA graphs for small batches in %.1f s", len(self._graphs), seconds)
        return len(self._graphs)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the model on a batch; see PackedModel. The next call may overwrite the result."""
        bucket = self._buckets.find(batch.num_tokens, len(batch.seq_lens), batch.max_seqlen)
        is_plain = not (need_attention or batch.cache is not None or batch.masked or batch.adapters)
        if bucket is None or bucket not in self._graphs or not is_plain:
            return self._model.forward(batch, need_attention=need_attention)
        return ModelOutput(hidden_states=self._replay(bucket, batch))

    def _record(self, bucket: Bucket, make_batch: Callable[[Sequence[int]], PackedBatch]) -> _Graph:
        seq_lens = bucket.seq_lens()
        self._fill(bucket, make_batch([length for length in seq_lens if length]))
        ids, positions, types = self._rows[:, : bucket.num_tokens]
        static = PackedBatch(
            input_ids=ids,
            positions=positions,
            token_type_ids=types,
            cu_seqlens=self._cu_seqlens[: bucket.num_seqs + 1],
            seq_lens=seq_lens,
            max_seqlen=bucket.max_seqlen,
            skip_tokens=None,
        )
        return _Graph(*self._recorder.record(lambda: self._model.forward(static).hidden_states))

    def _replay(self, bucket: Bucket, batch: PackedBatch) -> Tensor:
        """Returns the hidden states [T, D] of a batch. The next call overwrites them."""
        self._fill(bucket, batch)
        graph = self._graphs[bucket]
        graph.replay()
        return graph.hidden_states[: batch.num_tokens]

    def _fill(self, bucket: Bucket, batch: PackedBatch) -> None:
        """Copies a batch to the front of the captured inputs and clears the rest. Does not wait for the device."""
        num_tokens = batch.num_tokens
        num_boundaries = len(batch.seq_lens) + 1
        rows = self._rows[:, : bucket.num_tokens]
        cu_seqlens = self._cu_seqlens[: bucket.num_seqs + 1]
        for row, values in zip(rows, (batch.input_ids, batch.positions, batch.token_type_ids), strict=True):
            if values is None:
                row.zero_()
            else:
                row[:num_tokens].copy_(values)
        rows[:, num_tokens:].zero_()
        cu_seqlens[:num_boundaries].copy_(batch.cu_seqlens)
        cu_seqlens[num_boundaries:].fill_(num_tokens)

    def _is_right(self, bucket: Bucket, make_batch: Callable[[Sequence[int]], PackedBatch]) -> bool:
        """Whether a replay equals the forward, and a sequence has the same bits alone and in a batch.

        The bits differ if the graph has captured the lengths.
        """
        lengths = _other_lens(bucket)
        batch = make_batch(lengths)
        expected = self._model.forward(batch).hidden_states.float()
        found = self._replay(bucket, batch).to(torch.float32, copy=True)  # the next replay overwrites it
        alone = self._replay(bucket, make_batch(lengths[:1])).float()
        is_close = (found - expected).abs().max() <= _TOLERANCE * expected.abs().max()
        return bool(is_close.item()) and torch.equal(found[: lengths[0]], alone)


def _other_lens(bucket: Bucket) -> list[int]:
    """Returns lengths that differ from the captured ones and leave rows and sequences of a bucket empty."""
    lengths: list[int] = []
    for i in range(bucket.num_seqs - 1):
        length = min(2 * i + 3, bucket.max_seqlen)
        if sum(lengths) + length >= bucket.num_tokens:
            break
        lengths.append(length)
    return lengths


def record_forwards(
    model: PackedModel, info: ModelInfo, samples: SampleBatches, device: torch.device, limits: SchedulerConfig
) -> ForwardGraphs | None:
    """Returns the captured forwards of small batches; None on a CPU, or if the model does not support capture."""
    if device.type != "cuda" or not model.is_recordable:
        return None
    graphs = ForwardGraphs(model, CudaRecorder(device), small_batches(info, limits), device)

    def make(lengths: Sequence[int]) -> PackedBatch:
        chunks = samples.batch(lengths, samples.default_params()[:1])
        return PackedBatch.build([chunk.sequence.tokens for chunk in chunks], device)

    return graphs if graphs.record(make) else None


def small_batches(info: ModelInfo, limits: SchedulerConfig) -> BucketTable:
    """Returns the bucket sizes to capture."""
    max_tokens = min(limits.token_budget(info.device), _MAX_TOKENS)
    return BucketTable(max_tokens, info.max_model_len, limits.seqs(info.device))
