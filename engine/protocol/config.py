"""Settings of one engine: what is served, where it runs and how much it may take.

Frozen dataclasses only; flags and environment variables are read in server/settings/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from .errors import InvalidRequestError
from .pooler_config import PoolerConfig, check_least

DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "int8")
DEVICES: Final = ("auto", "cpu", "cuda")
PLACE: Final = re.compile(r"cpu|cuda:\d+|numa:\d+")
"""A device of one replica."""
EMPTY_INPUTS: Final = ("embed", "error")
CPU_KERNELS: Final = ("auto", "native", "torch")
ARITHMETICS: Final = (None, "float32", "bfloat16")
_CPU_TOKEN_BUDGET: Final = 2048
"""Tokens. More brings no throughput on a CPU, but longer steps and more memory."""
_CUDA_TOKEN_BUDGET: Final = 16_384
_LARGE_CUDA_TOKEN_BUDGET: Final = 32_768
"""What the host does for a batch is less for a token, and small models fill a large GPU."""
_LARGE_CUDA: Final = 40_000_000_000
"""Bytes of memory from which on a GPU counts as large."""
_CPU_SEQS: Final = 512
_CUDA_SEQS: Final = 2048
"""Sequences. Of short texts 512 are too few to fill a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one forward and of the waiting queue.

    Attributes:
        max_num_batched_tokens: Tokens in one forward; None takes 2,048 on CPU and 16,384 on CUDA, 32,768 where the GPU
            has 40 GB or more.
        max_num_seqs: Sequences in one forward; None takes 512 on CPU and 2,048 on CUDA.
        max_queued_tokens: Tokens that wait or run at which new requests are refused; one request may have no more.
        max_queue_s: Seconds that they take at which new requests are refused.
        max_wait_s: Seconds after which a waiting sequence goes before better-fitting ones.
        enable_chunked_prefill: Cut long sequences of models that look back only into chunks, one forward each.
        chunk_size: Tokens of a chunk; None lets it follow the time that a forward takes and what else waits.
    """

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_queued_tokens: int = 4_000_000
    max_queue_s: float = 60.0
    max_wait_s: float = 0.5
    enable_chunked_prefill: bool = True
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        check_least(self, 1, "max_num_batched_tokens", "max_num_seqs", "max_queued_tokens", "chunk_size")
        check_least(self, 0, "max_wait_s")
        if not self.max_queue_s > 0:
            raise ValueError(f"max_queue_s is {self.max_queue_s}; it must be above 0.")

    def token_budget(self, device: str, memory: int | None = None) -> int:
        """Returns the tokens in one forward on a device, unless the longest input has more.

        Args:
            device: Such as "cpu" or "cuda:1".
            memory: Bytes that a GPU has; None takes one that is not large.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if device == "cpu":
            return _CPU_TOKEN_BUDGET
        return _LARGE_CUDA_TOKEN_BUDGET if (memory or 0) >= _LARGE_CUDA else _CUDA_TOKEN_BUDGET

    def seqs(self, device: str) -> int:
        """Returns the sequences in one forward on a device."""
        return self.max_num_seqs or (_CPU_SEQS if device == "cpu" else _CUDA_SEQS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrefillConfig:
    """How long prompts are cut into chunks.

    Attributes:
        chunk_size: Tokens of a chunk while memory is free.
        threshold: Tokens. Longer prompts are worth cutting; None takes `chunk_size`.
        min_chunk_size: Tokens. Chunks are not made smaller, but for the last of a prompt and where `chunk_size` is.
        is_dynamic: Whether chunks follow memory, which may run short, and the time that forwards take.
        ageing_s: Seconds of waiting that are worth one level of priority.
        token_s: Seconds by which the next chunk of a prompt is due later for every token of it that ran, so that
            others get a turn before a very long one is done; 0 runs them one after the other.
        max_retries: Failures in a row that are tried again; one more fails the prompt.
    """

    chunk_size: int = 512
    threshold: int | None = None
    min_chunk_size: int = 64
    is_dynamic: bool = True
    ageing_s: float = 1.0
    token_s: float = 0.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        check_least(self, 1, "chunk_size", "min_chunk_size")
        check_least(self, 0, "threshold", "max_retries", "ageing_s", "token_s")

    def sized(self, chunk_size: int, memory_pressure: float) -> int:
        """Returns the tokens of a chunk under a memory pressure, in steps of the smallest chunk.

        Args:
            chunk_size: Tokens of a chunk while memory is free.
            memory_pressure: Share of a full chunk for which there is no memory, 0 to 1.

        Raises:
            InvalidRequestError: An argument is out of range.
        """
        if chunk_size < 1:
            raise InvalidRequestError(f"chunk_size is {chunk_size}; it must be at least 1.", param="chunk_size")
        if not 0 <= memory_pressure <= 1:
            raise InvalidRequestError(
                f"memory_pressure is {memory_pressure}; it must lie between 0 and 1.", param="memory_pressure"
            )
        if not self.is_dynamic or memory_pressure == 0:
            return chunk_size
        step = min(self.min_chunk_size, chunk_size)
        return max(step, int(chunk_size * (1 - memory_pressure)) // step * step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Memory of prompts that run in chunks. Models that run them whole take none.

    Attributes:
        kv_cache_memory: Bytes; None takes `memory_fraction`.
        memory_fraction: Share of the memory that is free once the model is loaded.
        block_size: Tokens of a block of keys and values.
        enable_prefix_caching: Keep keys and values of past prompts for later ones that begin alike.
    """

    kv_cache_memory: int | None = None
    memory_fraction: float = 0.25
    block_size: int = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        check_least(self, 1, "kv_cache_memory", "block_size")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start.

    Attributes:
        model: Local folder or hub id.
        name: Name of the model in messages. None: `model`.
        model_source: Where `model` comes from, for the table of what was resolved.
        revision: Branch, tag or commit of a hub id.
        device: "auto", "cpu" or "cuda" (or "cuda:1").
        devices: Where replicas run, one on each: "cpu", "cuda:1", or "numa:1" for the cores of a NUMA node; all of one
            kind. A place may come several times; its replicas share it. Empty: `device`.
        data_parallel: Replicas of the model, each a process, behind one queue; None takes one for each of `devices`,
            which else have as many each, or one.
        dtype: "float32", "bfloat16", "float16", "int8" (the native kernels only) or "auto": bfloat16 on CUDA and on a
            CPU whose native kernels are faster in it, else float32.
        max_model_len: Tokens. Longest input; None takes the model's own.
        auto_truncate: Cut over-long inputs instead of refusing them.
        empty_input: What becomes of a text that is empty or white space: "embed" runs what the tokenizer puts around
            it, or the token that ends a text where that is nothing; "error" refuses it.
        pooler_config: The operator's pooler settings.
        hf_overrides: Values laid over the model's config.json.
        chat_template: Jinja template that replaces the model's own; None takes that.
        trust_remote_code: Let the fallback run code that comes with the model.
        in_process: Run the core in a thread of this process instead of a supervised one.
        hang_timeout_s: Seconds without a sign of life after which a supervised process is replaced; 0: never.
        step_timeout_s: Seconds that a forward may always take. One that takes longer, and 10 times as long as the
            longest forward before it, counts as hung: its engine is replaced; 0: never.
        num_threads: CPU threads of the forward, of each replica; None takes all cores, or this engine's part of them.
        num_engines: Engines that share the machine: each takes its part of what it is not told the amount of, cores and
            memory for prompts in chunks.
        cores: Processors that the engine's process keeps to; None: all that it may use. Set for replicas.
        cpu_kernels: Kernels for a CPU: "auto" takes the native kernels where they are built and know the model,
            and torch elsewhere; "native" insists on them; "torch" leaves all to torch.
        arithmetic: What native kernels compute in where numbers are rounded to bfloat16: "bfloat16" or "float32"; None
            takes what is measured to be faster.
        tokenizer_workers: Threads that tokenize.
        max_queued_chars: Characters that may wait for them at once; more is refused whole.
        cuda_graphs: Record the forwards of small batches of encoders on CUDA, and replay them.
        scheduler: Batch and queue limits.
        cache: Memory of prompts that run in chunks.
    """

    model: str
    name: str | None = None
    model_source: str = "--model"
    revision: str | None = None
    device: str = "auto"
    devices: tuple[str, ...] = ()
    data_parallel: int | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    auto_truncate: bool = False
    empty_input: str = "embed"
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    trust_remote_code: bool = False
    in_process: bool = False
    hang_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    num_threads: int | None = None
    num_engines: int = 1
    cores: tuple[int, ...] | None = None
    cpu_kernels: str = "auto"
    arithmetic: str | None = None
    tokenizer_workers: int = 2
    max_queued_chars: int = 64_000_000
    cuda_graphs: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.device.split(":")[0] not in DEVICES:
            raise ValueError(f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}.")
        if not all(map(PLACE.fullmatch, self.devices)) or len({d.partition(":")[0] for d in self.devices}) > 1:
            listed = ",".join(self.devices)
            raise ValueError(f"devices is {listed!r}; they must be all cuda:N, all numa:N or all cpu.")
        if self.cpu_kernels not in CPU_KERNELS:
            raise ValueError(f"cpu_kernels is {self.cpu_kernels!r}; it must be one of {', '.join(CPU_KERNELS)}.")
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic is {self.arithmetic!r}; it must be float32, bfloat16 or None.")
        if self.empty_input not in EMPTY_INPUTS:
            raise ValueError(f"empty_input is {self.empty_input!r}; it must be one of {', '.join(EMPTY_INPUTS)}.")
        for name, value in (("hang_timeout_s", self.hang_timeout_s), ("step_timeout_s", self.step_timeout_s)):
            if not 0 <= value < inf:
                raise ValueError(f"{name} is {value}; it must be seconds, or 0 for never.")
        counts = ("data_parallel", "num_threads", "num_engines", "tokenizer_workers")
        check_least(self, 1, "max_model_len", "max_queued_chars", *counts)
