"""Warm-up: batches that run before the first request.

Every model runs one batch with all its tasks. A GPU also runs the largest batch, to measure its memory, and a batch of
every kind of request: triton compiles a kernel for each new kind of arguments (up to seconds), and cuBLAS loads another
kernel for each range of sizes. The kind of a batch depends on its tasks, its longest sequence (which selects tile sizes
and split work), its number of tokens, and whether sequences continue earlier chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..protocol.batch_outputs import BatchOutputs
from ..protocol.config import SchedulerConfig
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingTask
from ..scheduling import InputSequence, PrefillChunk, Request, SequencePool
from .loading.load_errors import needs_torch
from .runner import DeviceLimits, DeviceMemoryError, Forward

if TYPE_CHECKING:
    from .device.memory import MemoryGauge

logger = logging.getLogger("penstock.engine")

_CLASS_TASKS: Final = (PoolingTask.CLASSIFY, PoolingTask.SCORE, PoolingTask.TOKEN_CLASSIFY)
_TASKS_WITH_DIMENSIONS: Final = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
_MIN_BATCH: Final = 64
"""Tokens. A model cannot be served if memory is too short for a forward of this size."""
_GRAPH_BATCH: Final = 64
"""Tokens of a batch that replays a CUDA graph, if there is one."""
_TILE_ROWS: Final = (16, 32, 64, 128, 256, 512)
"""Tile sizes of kernels in rows."""
_SPLIT_ROWS: Final = 256
"""Rows. Pooling splits longer sequences, with other kernels."""
_SHORT_TOKENS: Final = 8
"""Tokens of a short text."""
_CHUNK_TOKENS: Final = (_SHORT_TOKENS, 64, 320)
"""Tokens of chunks. They select the tiles of attention. Chunks above `_SPLIT_ROWS` are pooled by other kernels."""
_PROGRESS_S: Final = 5.0
"""Seconds between two log lines."""


class SampleBatches:
    """Builds batches of any lengths and tasks for one model."""

    def __init__(self, info: ModelInfo, tokenizer: TokenizerSpec) -> None:
        self._info = info
        self._ids = np.array(tokenizer.sample_ids, np.int32)
        self._has_types = tokenizer.uses_token_types
        # `score` runs as another task, unless it is the only one.
        self._tasks: list[PoolingTask] = [task for task in info.tasks if task is not PoolingTask.SCORE]
        self._tasks = self._tasks or list(info.tasks)

    def all_params(self) -> list[PoolingParams]:
        """Returns all parameters that select different kernels: every task, normalisation and some dimensions."""
        info = self._info
        found = self.default_params()
        widths = [w for w in (info.matryoshka_dimensions or (info.embedding_size // 2,)) if w < info.embedding_size]
        for task in _TASKS_WITH_DIMENSIONS:
            if task in info.tasks:
                found.append(PoolingParams(normalize=not info.normalize).resolved(task, info))
                if info.is_matryoshka or info.matryoshka_dimensions:
                    found += [PoolingParams(dimensions=width).resolved(task, info) for width in widths]
        return found

    def default_params(self) -> list[PoolingParams]:
        """Returns the default parameters of every task."""
        return [PoolingParams().resolved(task, self._info) for task in self._tasks]

    def batch(self, lengths: Sequence[int], params: Sequence[PoolingParams]) -> list[PrefillChunk]:
        """Returns whole sequences in ascending length. Sequence i gets `params[i % len(params)]`."""
        return [
            PrefillChunk(self.sequence(i, length, params[i % len(params)]), 0, length)
            for i, length in enumerate(sorted(lengths))
        ]

    def sequence(self, number: int, length: int, params: PoolingParams) -> InputSequence:
        """Returns a sequence of `length` tokens. It has both token types if the model uses them."""
        tokens = TokenizedInput(
            np.resize(self._ids, length),
            type_boundary=length // 2 if self._has_types else 0,
            num_skipped_tokens=0 if self._info.include_prompt else 1,
        )
        return InputSequence(sequence_id=number, tokens=tokens, num_tokens=length, request=Request(0, params))


def warm_up(
    info: ModelInfo, tokenizer: TokenizerSpec, execute: Callable[[Sequence[PrefillChunk]], BatchOutputs]
) -> None:
    """Runs one batch with every task; see Runner.warm_up.

    Computes classes as logits, because an activation may hide infinite values.

    Raises:
        WeightError: The model returns NaN or inf.
    """
    tokens = TokenizedInput(np.array(tokenizer.sample_ids[-info.max_model_len :], np.int32))
    if info.image_spec is not None:
        image = info.image_spec.gray()
        if tokenizer.input_prompts is None:
            tokens = TokenizedInput.of_image(image, info.image_spec.num_class_rows)
        else:
            tiles = tokenizer.input_prompts.tiles
            token_id = tokenizer.input_prompts.placeholder_id
            num_rows = info.image_spec.num_tokens(image) if tiles is None else tiles.num_rows
            placeholders = np.full(num_rows, token_id, np.int32)
            tokens = TokenizedInput(np.concatenate([tokens.token_ids, placeholders, tokens.token_ids]), images=(image,))
    first, *others = info.tasks
    others = [task for task in others if task is not PoolingTask.SCORE]
    chunks = []
    for number, task in enumerate((first, first, *others)):
        params = PoolingParams(use_activation=False if task in _CLASS_TASKS else None).resolved(task, info)
        sequence = InputSequence(sequence_id=number, tokens=tokens, num_tokens=len(tokens), request=Request(0, params))
        chunks.append(PrefillChunk(sequence, 0, len(tokens)))
    outputs = execute(chunks)
    if not outputs.is_finite.all():
        found = f"{info.name} returns NaN or infinite values for a plain input; the search for damaged weights"
        with needs_torch(found, "it reads weights of every dtype"):
            from .loading.weights_loader import not_finite_error  # imports torch

        raise not_finite_error(info)


class GpuWarmUp:
    """The warm-up of a runner on a GPU: finds its limits, compiles kernels, and makes torch allocate its memory.

    Args:
        memory: Bytes of the device; None if unknown.
    """

    def __init__(
        self,
        info: ModelInfo,
        samples: SampleBatches,
        begin: Callable[[Sequence[PrefillChunk]], Forward],
        config: SchedulerConfig,
        gauge: MemoryGauge,
        memory: int | None,
    ) -> None:
        self._info = info
        self._samples = samples
        self._begin = begin
        self._config = config
        self._gauge = gauge
        self._memory = memory

    def find_limits(self, *, is_whole: bool) -> tuple[DeviceLimits, int]:
        """Runs the largest forward. Returns the limits, and the peak bytes of the forward.

        Args:
            is_whole: Whether inputs of every length run whole.

        Raises:
            DeviceMemoryError: Memory is too short even for a small forward.
        """
        budget = self._config.token_budget(self._info.device, self._memory)
        if is_whole:
            budget = max(budget, self._info.max_model_len)
        num_tokens, num_bytes = largest_batch(
            self._run_default,
            self._gauge,
            num_tokens=budget,
            longest=self._info.max_model_len,
            max_num_seqs=self._config.seqs(self._info.device),
        )
        logger.info("a forward of %d tokens uses %d MiB in addition to the weights", num_tokens, num_bytes >> 20)
        return DeviceLimits(memory=self._memory, max_tokens=num_tokens), num_bytes

    def compile(self, sequence_pool: SequencePool, limits: DeviceLimits) -> None:
        """Runs a batch of every kind."""
        assert limits.max_tokens is not None, "the limits were found"
        run_all_kinds(
            self._samples,
            self._execute,
            sequence_pool,
            token_budget=limits.max_tokens,
            longest=self._info.max_model_len,
            max_num_seqs=self._config.seqs(self._info.device),
        )

    def allocate_again(self, limits: DeviceLimits) -> None:
        """Runs the largest batches, and two small ones at once, so that torch allocates its memory again.

        Before torch captures a CUDA graph, it returns its cached memory, pinned memory too, to the driver. Without this
        call requests would wait for the allocation.
        """
        assert limits.max_tokens is not None, "the limits were found"
        max_num_seqs = self._config.seqs(self._info.device)
        for lengths in largest_shapes(limits.max_tokens, self._info.max_model_len, max_num_seqs):
            try:
                self._run_default(lengths)
            except DeviceMemoryError as error:  # the scheduler lowers the budget if requests run out of memory
                logger.warning("out of memory beside CUDA graphs with %d tokens: %s", sum(lengths), error)
        small = [min(_GRAPH_BATCH, self._info.max_model_len, limits.max_tokens)]
        params = self._samples.default_params()[:1]
        for forward in [self._begin(self._samples.batch(small, params)) for _ in range(2)]:
            forward.outputs()

    def _execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        return self._begin(chunks).outputs()

    def _run_default(self, lengths: Sequence[int]) -> None:
        for params in self._samples.default_params():
            self._execute(self._samples.batch(lengths, [params]))


def largest_batch(
    run: Callable[[Sequence[int]], object], gauge: MemoryGauge, *, num_tokens: int, longest: int, max_num_seqs: int
) -> tuple[int, int]:
    """Runs the largest batches, and smaller ones if memory is too short for them.

    Args:
        run: Runs a batch of sequences with the given lengths.
        gauge: Measures the memory of the device.
        num_tokens: Tokens of the first attempt.
        longest: Tokens of the longest sequence.
        max_num_seqs: Sequences of the largest forward.

    Returns:
        The tokens of the largest forward that fits, and the most bytes that it takes.

    Raises:
        DeviceMemoryError: Memory is too short even for a small batch.
    """
    while True:
        try:
            num_bytes = max(
                _peak_bytes(run, gauge, lengths) for lengths in largest_shapes(num_tokens, longest, max_num_seqs)
            )
        except DeviceMemoryError:
            if num_tokens <= _MIN_BATCH:
                raise
            smaller = max(num_tokens // 2, _MIN_BATCH)
            logger.warning("out of memory in a forward of %d tokens; trying %d.", num_tokens, smaller)
            num_tokens = smaller
        else:
            return num_tokens, num_bytes


def largest_shapes(num_tokens: int, longest: int, max_num_seqs: int) -> list[list[int]]:
    """Returns the lengths of two batches of `num_tokens` tokens: longest sequences, and as many as possible."""
    longest = min(longest, num_tokens)
    num_long, rest = divmod(num_tokens, longest)
    num_short = min(num_tokens, max_num_seqs)
    each, more = divmod(num_tokens, num_short)
    many = [min(each + (i < more), longest) for i in range(num_short)]
    return [[longest] * min(num_long, max_num_seqs) + [rest] * (rest > 0 and num_long < max_num_seqs), many]


def _peak_bytes(run: Callable[[Sequence[int]], object], gauge: MemoryGauge, lengths: Sequence[int]) -> int:
    gauge.reset_peak()
    run(lengths)
    return gauge.peak_bytes() or 0


def run_all_kinds(
    samples: SampleBatches,
    run: Callable[[Sequence[PrefillChunk]], object],
    sequence_pool: SequencePool,
    *,
    token_budget: int,
    longest: int,
    max_num_seqs: int,
) -> int:
    """Runs a batch of every kind and logs the progress.

    Returns:
        The number of batches that ran. Batches that run out of memory are skipped with a warning.
    """
    began_s = logged_s = time.monotonic()
    num_run = 0
    for batch in _all_kinds(samples, sequence_pool, token_budget, longest, max_num_seqs):
        num_tokens = sum(chunk.num_tokens for chunk in batch)
        try:
            run(batch)
        except DeviceMemoryError as error:
            logger.warning("out of memory while warming up with %d tokens: %s", num_tokens, error)
            continue
        num_run += 1
        if time.monotonic() - logged_s >= _PROGRESS_S:
            logged_s = time.monotonic()
            logger.info("warming up: %d batches in %.0f s so far", num_run, logged_s - began_s)
    logger.info("warmed up: %d batches of up to %d tokens in %.1f s", num_run, token_budget, time.monotonic() - began_s)
    return num_run


def _all_kinds(
    samples: SampleBatches, sequence_pool: SequencePool, token_budget: int, longest: int, max_num_seqs: int
) -> Iterator[list[PrefillChunk]]:
    yield from _chunk_batches(samples, sequence_pool, token_budget, longest, max_num_seqs)
    longest = min(longest, token_budget)
    edges = [edge + beside for edge in _TILE_ROWS for beside in (-1, 0, 1)]
    kinds = [[1], [1, 2, 3, *(n for n in edges if n <= _SPLIT_ROWS)], [n for n in edges if n > _SPLIT_ROWS], [longest]]
    for lengths in kinds:
        fitting = _fit([n for n in lengths if n <= longest], token_budget, max_num_seqs)
        if fitting:
            for params in samples.all_params():
                yield samples.batch(fitting, [params])
            yield samples.batch(_fit(fitting * 2, token_budget, max_num_seqs), samples.all_params())
    num_tokens = 1
    while num_tokens <= token_budget:  # matrix products of every size, with long and with short sequences
        for length in (min(longest, num_tokens), min(_SHORT_TOKENS, longest, num_tokens)):
            lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
            yield samples.batch(_fit(lengths, token_budget, max_num_seqs), samples.default_params()[:1])
        num_tokens *= 2


def _fit(lengths: Sequence[int], token_budget: int, max_num_seqs: int) -> list[int]:
    """Returns the first lengths that fit in one forward together."""
    taken: list[int] = []
    left = token_budget
    for length in lengths[:max_num_seqs]:
        if length <= left:
            taken.append(length)
            left -= length
    return taken


def _chunk_batches(
    samples: SampleBatches, sequence_pool: SequencePool, token_budget: int, longest: int, max_num_seqs: int
) -> Iterator[list[PrefillChunk]]:
    """Yields three chunks of a sequence for every task and size, the second one with a whole sequence if it fits."""
    for size in sorted(
        {min(size, max(token_budget - _SHORT_TOKENS, token_budget // 2), longest // 3) for size in _CHUNK_TOKENS}
    ):
        if size < 1 or not sequence_pool.can_hold(3 * size):
            continue
        for params in samples.all_params():
            sequence = samples.sequence(-1, 3 * size, params)
            sequence.is_long = True
            sequence.allocation = sequence_pool.allocate(sequence.sequence_id, 3 * size)
            if sequence.allocation is None:
                return
            first, second, third = (PrefillChunk(sequence, i * size, (i + 1) * size) for i in range(3))
            try:
                yield [first]
                yield [*samples.batch([min(_SHORT_TOKENS, size)][: max_num_seqs - 1], [params]), second]
                yield [third]
            finally:
                sequence_pool.free(sequence.allocation, drop_cached_blocks=True)
