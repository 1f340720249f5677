"""Forwards of small batches of an encoder, recorded once for each bucket and replayed on the rows of a batch.

The recorded kernels read tensors that never move: ids, positions and types of as many rows as the bucket has, and the
borders of as many sequences. A batch is copied to their front. The rest of the rows is token 0 at position 0, and the
rest of the borders is the last one, so that the other sequences are empty: the rest belongs to no sequence. No kernel
mixes rows but attention and pooling, which look at those of a sequence alone, so whatever the rest becomes, NaN
included, stays in its own rows, and nobody reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...models.base import ModelOutput, PackedModel
from ...packed_batch import PackedBatch
from .buckets import Bucket, Buckets
from .recorder import Recorder

logger = logging.getLogger("penstock.engine")

_TOLERANCE: Final = 0.05
"""Of the largest value: what a replay may differ from the forward, in any type. Products of other sizes round in other
places."""


class _Graph(NamedTuple):
    """A recorded forward."""

    replay: Callable[[], None]
    hidden_states: Tensor  # [bucket.num_tokens, D]


class ForwardGraphs:
    """The forwards of one encoder: from a recording where a batch fits one, as they are else.

    Args:
        model: Its forward depends on nothing but the rows and borders of a batch, and waits for nothing.
        recorder: Of the model's device.
        buckets: Sizes that are recorded.
        device: Of the model.
    """

    def __init__(self, model: PackedModel, recorder: Recorder, buckets: Buckets, device: torch.device) -> None:
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
        """Records every bucket, and replays each once on another batch than it was recorded with.

        A model whose forward cannot be recorded, or whose replays give anything else, keeps none: the log says so.

        Args:
            make_batch: Makes a batch of sequences of these lengths.

        Returns:
            How many there are.

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
            # torch raises the same kind of error for what must not be recorded and for a device that is lost. A device
            # that is lost runs nothing else either.
            self._model.forward(make_batch([1]))
            self._recorder.wait()
            logger.warning("small batches run without CUDA graphs: %s", str(error).partition("\n")[0])
            return 0
        seconds = time.monotonic() - began_s
        logger.info("recorded %d CUDA graphs for small batches in %.1f s", len(self._graphs), seconds)
        return len(self._graphs)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the model on a batch; see PackedModel. What it gives is there until the next call."""
        bucket = self._buckets.find(batch.num_tokens, len(batch.seq_lens), batch.max_seqlen)
        is_plain = not need_attention and batch.cache is None and not batch.hidden
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
        """Returns the rows [T, D] of a batch that fits; the next call writes others there."""
        self._fill(bucket, batch)
        graph = self._graphs[bucket]
        graph.replay()
        return graph.hidden_states[: batch.num_tokens]

    def _fill(self, bucket: Bucket, batch: PackedBatch) -> None:
        """Copies a batch to the front of what is read, and makes the rest belong to no sequence. Waits for nothing."""
        num_tokens, num_borders = batch.num_tokens, len(batch.seq_lens) + 1
        rows, cu_seqlens = self._rows[:, : bucket.num_tokens], self._cu_seqlens[: bucket.num_seqs + 1]
        for row, values in zip(rows, (batch.input_ids, batch.positions, batch.token_type_ids), strict=True):
            if values is None:
                row.zero_()
            else:
                row[:num_tokens].copy_(values)
        rows[:, num_tokens:].zero_()
        cu_seqlens[:num_borders].copy_(batch.cu_seqlens)
        cu_seqlens[num_borders:].fill_(num_tokens)

    def _is_right(self, bucket: Bucket, make_batch: Callable[[Sequence[int]], PackedBatch]) -> bool:
        """Whether a replay gives what the forward gives, and for a sequence the same bits whatever is behind it.

        Those would differ if lengths had been recorded: what is behind it would count as its own.
        """
        lengths = _other_lens(bucket)
        batch = make_batch(lengths)
        expected = self._model.forward(batch).hidden_states.float()
        found = self._replay(bucket, batch).to(torch.float32, copy=True)  # the next replay writes there
        alone = self._replay(bucket, make_batch(lengths[:1])).float()
        is_close = (found - expected).abs().max() <= _TOLERANCE * expected.abs().max()
        return bool(is_close.item()) and torch.equal(found[: lengths[0]], alone)


def _other_lens(bucket: Bucket) -> list[int]:
    """Lengths that leave rows and sequences of a bucket empty, and are others than those it is recorded with."""
    lengths: list[int] = []
    for i in range(bucket.num_seqs - 1):
        length = min(2 * i + 3, bucket.max_seqlen)
        if sum(lengths) + length >= bucket.num_tokens:
            break
        lengths.append(length)
    return lengths
