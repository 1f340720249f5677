"""Runs tokenized inputs on the device. The only module above models/ and pooling/ that knows it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..layers.dense import Dense
from ..model_files.resolve import resolve_model, with_device
from ..models.base import PackedModel
from ..packed_batch import PackedBatch
from ..pooling import ModelPooler, PoolingMetadata, TokenMaps
from ..protocol.config import EngineConfig
from ..protocol.errors import ModelLoadError
from ..protocol.messages import TokenizerSpec
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.request import TokenizedInput
from ..scheduling.sequence import Sequence as QueuedSequence, SequenceSlice
from ..sequence_pool import KvCachePool, PoolPlan, SequenceAllocator, SequencePool, SsmStatePool, plan_pool
from ..sequence_pool.cache_spec import CacheSpec
from .describe_pool import describe_pool
from .forward_clock import ForwardClock
from .host import available_memory, usable_cores
from .slice_memory import SliceMemory, carry_of
from .token_heads_loader import load_token_maps
from .tokenizer_loader import load_tokenizer
from .weights_loader import load_dense, load_model, torch_dtype

logger = logging.getLogger("penstock.engine")

Outputs = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One slice to run.

    Attributes:
        slice: Which tokens of the sequence, and the memory that it holds.
        tokens: The whole sequence.
        params: Resolved.
    """

    slice: SequenceSlice
    tokens: TokenizedInput
    params: PoolingParams


class ModelRunner:
    """One model on one device. Used by one thread at a time. `load` makes one from an EngineConfig.

    Attributes:
        info: The model, on its device.
        tokenizer: For clients.
        allocator: The pool of sequences that run in slices; None where the model's cannot.
        clock: Times of the forwards.

    Args:
        info: See the attribute.
        tokenizer: See the attribute.
        model: With its weights.
        dense: The Dense modules that follow the pooling.
        config: Limits of the pool.
        maps: Heads for single tokens; None for none.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: TokenizerSpec,
        model: PackedModel,
        dense: Sequence[Dense],
        config: EngineConfig,
        maps: TokenMaps | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.allocator: SequenceAllocator | None = None
        self._device = torch.device(info.device)
        self._model = model
        self._pooler = ModelPooler(info, model, dense, maps or TokenMaps())
        self._memory: SliceMemory | None = None
        self.clock = ForwardClock(self._device)
        if model.cache_spec is not None and (
            config.scheduler.enable_chunked_prefill or config.cache.enable_prefix_caching
        ):
            self._make_pool(model.cache_spec, config)

    @classmethod
    def load(cls, config: EngineConfig) -> ModelRunner:
        """Loads the model that a configuration names.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        torch.set_num_threads(config.num_threads or usable_cores())
        info = with_device(resolve_model(config), *_resolve_device(config))
        tokenizer = load_tokenizer(info, trust_remote_code=config.trust_remote_code)
        model = load_model(info, trust_remote_code=config.trust_remote_code)
        return cls(info, tokenizer, model, load_dense(info), config, load_token_maps(info, tokenizer))

    @torch.inference_mode()
    def execute(self, work: Sequence[Work]) -> list[Outputs]:
        """Runs one forward and pools it. A forward that fails leaves no trace in what sequences keep.

        On CUDA the batch is packed while the last forward may still run.

        Args:
            work: Slices that begin a sequence first, in ascending length; then those that go on with one. Tasks may be
                mixed.

        Returns:
            Per slice, float32 arrays by output name: of a sequence's last slice all that is left of its answer, of an
            earlier one the rows of a token-level answer that are ready.
        """
        slices = [w.slice for w in work]
        params = [w.params for w in work]
        cache = None
        if self._memory is not None:
            self._memory.restore(slices)
            cache = self._memory.batch_cache(slices)
        if cache is None:
            batch = PackedBatch.build([w.tokens for w in work], self._device)
            metadata = PoolingMetadata.for_batch(batch, params)
        else:
            inputs = [w.tokens.slice(w.slice.start, w.slice.end) for w in work]
            batch = PackedBatch.build(inputs, self._device, starts=[s.start for s in slices], cache=cache)
            states = [None if s.sequence.carry is None else carry_of(s).states for s in slices]
            lengths = [s.sequence.num_tokens for s in slices]
            metadata = PoolingMetadata.for_batch(batch, params, prompt_lens=lengths, states=states)
        if any(w.tokens.query is not None for w in work):
            metadata.queries = [w.tokens.query for w in work]
        self.clock.begin()
        output = self._model.forward(batch, need_attention=self._pooler.needs_attention(params))
        outputs = list(self._pooler.pool(output, metadata).to_numpy())
        if self._memory is not None and cache is not None:
            for index, state in metadata.states.items():
                carry_of(slices[index]).states = state
            self._memory.advance(slices)
        chunk_tokens = sum(s.num_tokens for s in slices if s.chunk_id is not None)
        self.clock.end(chunk_tokens, batch.num_tokens - chunk_tokens)
        return outputs

    def preempt(self, slice_: SequenceSlice) -> None:
        """Saves what would be lost of a sequence whose memory others get."""
        if self._memory is not None:
            self._memory.save(slice_)

    def warm_up(self) -> None:
        """Runs one small batch, so that the first request does not pay for what happens once."""
        tokens = TokenizedInput(np.array(self.tokenizer.sample_ids[-self.info.max_model_len :], np.int32))
        params = PoolingParams().resolved(self.info.tasks[0], self.info)
        slices = [SequenceSlice(QueuedSequence(0, i, len(tokens), 0.0), 0, len(tokens)) for i in range(2)]
        self.execute([Work(slice_, tokens, params) for slice_ in slices])

    def _make_pool(self, spec: CacheSpec, config: EngineConfig) -> None:
        """Reserves the memory of sliced sequences, where there is enough for any.

        Raises:
            ModelLoadError: There is not, though the operator asks for it.
        """
        dtype, limits = torch_dtype(self.info.dtype), config.cache
        memory = limits.kv_cache_memory
        if memory is None:
            memory = int(available_memory(self._device) * limits.memory_fraction)
        try:
            plan = plan_pool(
                dataclasses.replace(spec, ssm_layers=2 * spec.ssm_layers),  # a slot has two places; see SliceMemory
                memory,
                block_size=limits.block_size,
                itemsize=dtype.itemsize,
                max_num_seqs=config.scheduler.max_num_seqs,
            )
        except ModelLoadError as error:
            if limits.kv_cache_memory is not None:
                raise
            logger.warning("inputs do not run in chunks: %s", error.message)
            return
        self._memory = SliceMemory(spec, plan, block_size=limits.block_size, dtype=dtype, device=self._device)
        self.allocator = _allocator(
            plan, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching and spec.shares_prefixes
        )
        logger.info("%s", describe_pool(self.allocator, config.scheduler, plan.bytes))


def _allocator(plan: PoolPlan, block_size: int, *, enable_prefix_caching: bool) -> SequenceAllocator:
    pool = SequencePool(
        kv=KvCachePool(plan.num_blocks, block_size) if plan.num_blocks else None,
        ssm=SsmStatePool(plan.num_slots) if plan.num_slots else None,
    )
    return SequenceAllocator(pool, enable_prefix_caching=enable_prefix_caching)


def _resolve_device(config: EngineConfig) -> tuple[str, str]:
    """Returns the device and dtype that "auto" stands for on this machine.

    Raises:
        ModelLoadError: The device is not there.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        raise ModelLoadError(
            f"--device is {device}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; "
            "install a CUDA build of torch and a driver, or take --device cpu."
        )
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cpu":
        return device, "float32"
    return device, "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
