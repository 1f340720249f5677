"""Settings of one engine: model, devices and limits.

server/settings/ turns each field with a `setting(...)` into a flag, an environment variable and a key of the
configuration file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from .errors import InvalidRequestError
from .setting import check_settings, json_object, parse_size, setting
from .tasks import ChunkedProcessingMode, PoolingTask, PoolingType, listed

DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "int8")
_REPLICA_DEVICE: Final = re.compile(r"cpu|cuda:\d+|numa:\d+")
EMPTY_INPUTS: Final = ("embed", "error")
MATRYOSHKA: Final = ("declared", "any")
CPU_KERNELS: Final = ("auto", "native", "torch")
ARITHMETICS: Final = (None, "float32", "bfloat16")
_CPU_TOKEN_BUDGET: Final = 2048
"""Tokens. A larger budget raises latency and memory on a CPU, not throughput."""
_CUDA_TOKEN_BUDGET: Final = 16_384
_LARGE_CUDA_TOKEN_BUDGET: Final = 32_768
"""Tokens. Larger batches reduce the host's work per token, and fill a large GPU with a small model."""
_LARGE_CUDA: Final = 40_000_000_000
"""Bytes of memory of the smallest GPU that counts as large."""
IMAGE_PIXELS: Final = 64_000_000
MAX_IMAGE_PIXELS: Final = 89_478_485
"""Above it Pillow warns of a decompression bomb."""
IMAGE_MEMORY: Final = 1 << 30
_MAX_LOGIT: Final = 2.0**126
"""This number and its reciprocal are normal numbers of float32, which has the logits."""
_CPU_SEQS: Final = 512
_CUDA_SEQS: Final = 2048
"""Sequences. 512 short texts do not fill a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """Settings of the pooler of one model (`--pooler-config`). None takes the value of the model's files.

    Enum fields also take names as plain strings, in any case. `returned_token_ids` also takes a list.

    Attributes:
        task: Restrict the model to this task, and to scoring if scoring uses the task; None: all tasks.
        pooling_type: Sets `tok_pooling_type` if it is ALL or STEP, else `seq_pooling_type`.
        seq_pooling_type: Pooling of the sequence.
        tok_pooling_type: Pooling of the tokens: ALL or STEP.
        normalize: L2-normalise embeddings. Requests may override it.
        dimensions: Width of embeddings. Requests may override it.
        use_activation: Apply the class activation. Requests may override it.
        logit_mean: Subtracted from class logits, before the activation.
        logit_sigma: Class logits are divided by it, after the mean is subtracted.
        logit_bias: Older name of `logit_mean`, as in vLLM. Moved to `logit_mean`.
        logit_scale: 1 / `logit_sigma`. Moved to `logit_sigma`.
        step_tag_id: STEP pooling: keep the rows of this token id.
        returned_token_ids: STEP pooling: keep these columns.
        attention_head: ATTENTION pooling: use the weights of this head; None averages all heads.
        enable_chunked_processing: Embed text above max_model_len in windows and average their vectors.
        max_embed_len: Tokens. Limit of an input with enable_chunked_processing; None: the limit of the queue.
        chunk_overlap: Tokens that a window shares with the one before it.
        chunked_processing_mode: How windows are cut and averaged.
    """

    task: PoolingTask | None = None
    pooling_type: PoolingType | None = None
    seq_pooling_type: PoolingType | None = None
    tok_pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    attention_head: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    chunk_overlap: int | None = None
    chunked_processing_mode: ChunkedProcessingMode | None = None

    def __post_init__(self) -> None:
        for name in _POOLER_TYPES:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        check_minimum(self, 1, "dimensions", "max_embed_len")
        for name in ("logit_mean", "logit_sigma", "logit_bias", "logit_scale"):
            value = getattr(self, name)
            if value is not None and not abs(value) <= _MAX_LOGIT:
                raise ValueError(f"{name} is {value}; it must be a finite number of float32.")
        if self.logit_sigma is not None and abs(self.logit_sigma) < 1 / _MAX_LOGIT:
            raise ValueError(f"logit_sigma is {self.logit_sigma:g}; logits are divided by it, so it must not be 0.")
        if self.logit_scale is not None and abs(self.logit_scale) < 1 / _MAX_LOGIT:
            raise ValueError(f"logit_scale is {self.logit_scale:g}; every class would get the same score.")
        if self.pooling_type is not None:
            name = "tok_pooling_type" if self.pooling_type.is_token_level else "seq_pooling_type"
            if getattr(self, name) not in (None, self.pooling_type):
                raise ValueError(f"pooling_type is {self.pooling_type}, {name} is {getattr(self, name)}; give one.")
            object.__setattr__(self, name, self.pooling_type)
        for name, is_token_level in (("seq_pooling_type", False), ("tok_pooling_type", True)):
            kind: PoolingType | None = getattr(self, name)
            if kind is not None and kind.is_token_level != is_token_level:
                raise ValueError(f"{name} is {kind}; that pools {'the sequence' if is_token_level else 'the tokens'}.")
        self._rename("logit_bias", "logit_mean", self.logit_bias)
        self._rename("logit_scale", "logit_sigma", None if self.logit_scale is None else 1 / self.logit_scale)
        check_minimum(self, 0, "attention_head", "step_tag_id", "chunk_overlap")
        for name in ("max_embed_len", "chunk_overlap", "chunked_processing_mode"):
            if getattr(self, name) is not None and not self.enable_chunked_processing:
                raise ValueError(f"{name} needs enable_chunked_processing: true.")
        if self.chunk_overlap and self.chunked_processing_mode is ChunkedProcessingMode.VLLM:
            raise ValueError(f"chunk_overlap is {self.chunk_overlap}; the mode 'vllm' has no overlap.")

    def _rename(self, older: str, name: str, value: float | None) -> None:
        """Moves the value of an older name to its field. Raises ValueError if both are set."""
        if value is None:
            return
        if getattr(self, name) is not None:
            raise ValueError(f"{older} is the older name of {name}, but both are given; leave {older} out.")
        object.__setattr__(self, name, value)
        object.__setattr__(self, older, None)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PoolerConfig:
        """Builds the configuration from plain values.

        Raises:
            ValueError: An unknown field or a value of the wrong type; the message names it.
        """
        known = set(_POOLER_TYPES)
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {listed(sorted(known))}.")
        return cls(**fields)


def check_minimum(config: object, minimum: int, *names: str) -> None:
    """Raises ValueError if one of the fields is set and below `minimum`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"{name} is {value}; it must be {f'at least {minimum}' if minimum else '0 or more'}.")


_POOLER_TYPES: Final = {name: get_args(kind)[0] for name, kind in get_type_hints(PoolerConfig).items()}
"""The type of each field of PoolerConfig, without None."""


def _checked(name: str, value: Any) -> Any:
    """Returns `value` in the type of the PoolerConfig field `name`. Raises ValueError if it has the wrong type."""
    if value is None:
        return None
    kind = _POOLER_TYPES[name]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(str(value) if kind is PoolingType else str(value).lower())
        except ValueError:
            raise ValueError(f"{name} is {value!r}; it must be one of {listed(kind)}.") from None
    if kind is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind is float:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif kind is int:
        fits, wanted = type(value) is int, "an integer"
    else:
        is_list = type(value) in (list, tuple) and bool(value)
        fits, wanted = is_list and all(type(i) is int and i >= 0 for i in value), "a list of token ids"
    if not fits:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}.")
    if isinstance(value, list):
        return tuple(value)
    return float(value) if kind is float else value


def _device_rule(value: str) -> str | None:
    is_device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", value)
    return None if is_device else "must be auto, cpu, cuda or cuda:N, such as cuda:1"


def _devices_rule(value: tuple[str, ...]) -> str | None:
    if all(map(_REPLICA_DEVICE.fullmatch, value)) and len({device.partition(":")[0] for device in value}) <= 1:
        return None
    return "must be all cuda:N, all numa:N or all cpu, such as cuda:0,cuda:1"


def _adapters_rule(value: tuple[str, ...]) -> str | None:
    names = [entry.partition("=")[0] for entry in value]
    if not all(re.fullmatch(r"[^\s:/=]+=.+", entry) for entry in value):
        return "must be NAME=FOLDER, such as legal=/models/legal-lora; a name has no space, colon or slash"
    return None if len(set(names)) == len(names) else "must have a different name for each adapter"


def _pooler_config(value: object) -> PoolerConfig:
    return value if isinstance(value, PoolerConfig) else PoolerConfig.from_dict(json_object(value))


def _template(value: str) -> str:
    """Returns a template, read from its file if the value is a path."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"is neither a template nor a file of UTF-8 text that can be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one forward and of the waiting queue.

    Attributes:
        max_wait_s: Seconds after which a waiting sequence runs before sequences that fit the batch better.
    """

    max_num_batched_tokens: int | None = setting(
        None,
        "Tokens in one forward; default: 2,048 on CPU, 16,384 on CUDA, 32,768 on GPUs of 40 GB or more.",
        "Limits",
        "TOKENS",
        min_value=1,
    )
    max_num_seqs: int | None = setting(
        None, "Sequences in one forward; default: 512 on CPU, 2,048 on CUDA.", "Limits", "N", min_value=1
    )
    max_queued_tokens: int = setting(
        4_000_000,
        "Waiting and running tokens at which new requests are rejected with 429. No request may have more.",
        "Limits",
        "TOKENS",
        min_value=1,
    )
    max_queue_s: float = setting(
        60.0,
        "Seconds of waiting and running work at which new requests are rejected with 429. Requests above a sixteenth "
        "of the limit may take half of it together, or one of them more. Lower it for interactive use, for example to "
        "6. 0: no limit.",
        "Limits",
        "SECONDS",
        min_value=0,
        max_value=inf,
    )
    max_wait_s: float = 0.5
    enable_chunked_prefill: bool = setting(
        True,
        "Run long inputs of causal models in chunks, so that short inputs run between them.",
        "Memory",
    )
    chunk_size: int | None = setting(
        None,
        "Tokens of a chunk of causal models; default: adapts to the speed of the device and to the queue.",
        "Memory",
        "TOKENS",
        min_value=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_minimum(self, 0, "max_wait_s")
        if self.max_queue_s == 0:
            object.__setattr__(self, "max_queue_s", inf)

    def token_budget(self, device: str, memory: int | None = None) -> int:
        """Returns the most tokens in one forward on a device. An input that is longer runs alone.

        Args:
            device: Such as "cpu" or "cuda:1".
            memory: Bytes of GPU memory; None counts as a small GPU.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if device == "cpu":
            return _CPU_TOKEN_BUDGET
        return _LARGE_CUDA_TOKEN_BUDGET if (memory or 0) >= _LARGE_CUDA else _CUDA_TOKEN_BUDGET

    def seqs(self, device: str) -> int:
        """Returns the most sequences in one forward on a device."""
        return self.max_num_seqs or (_CPU_SEQS if device == "cpu" else _CUDA_SEQS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrefillConfig:
    """How long sequences are cut into chunks.

    Attributes:
        chunk_size: Tokens of a chunk while memory is free.
        threshold: Tokens. Only longer sequences are cut; None takes `chunk_size`.
        min_chunk_size: Tokens of the smallest chunk, except for the last chunk of a sequence and if
            `chunk_size` is smaller.
        is_dynamic: Whether the chunk size adapts to free memory and to the duration of forwards.
        ageing_s: Seconds of waiting that equal one level of priority.
        max_retries: Consecutive failures of a chunk that are retried; one more fails the sequence.
    """

    chunk_size: int = 512
    threshold: int | None = None
    min_chunk_size: int = 64
    is_dynamic: bool = True
    ageing_s: float = 1.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        check_minimum(self, 1, "chunk_size", "min_chunk_size")
        check_minimum(self, 0, "threshold", "max_retries", "ageing_s")

    def sized(self, chunk_size: int, memory_pressure: float) -> int:
        """Returns the tokens of a chunk under memory pressure, a multiple of the smallest chunk.

        Args:
            chunk_size: Tokens of a chunk while memory is free.
            memory_pressure: Share of a full chunk that does not fit into memory, 0 to 1.

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
    """Memory of sequences that run in chunks. Models that run all sequences whole use none."""

    kv_cache_memory: int | None = setting(
        None,
        "Memory of causal models for inputs that run in chunks and for cached prefixes, such as 2GiB or 500MB; "
        "default: --cache-memory-fraction of the free memory. If the model's longest input does not fit, the limit of "
        "inputs is lowered.",
        "Memory",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    cache_memory_fraction: float = setting(
        0.25,
        "Share of the memory that is free after loading the model, for --kv-cache-memory.",
        "Memory",
        "SHARE",
        exclusive_min=0,
        max_value=1,
    )
    kv_block_size: int = setting(16, "Tokens of a block of the KV cache.", "Memory", "TOKENS", min_value=1)
    enable_prefix_caching: bool = setting(
        True, "Keep keys and values of past inputs for later inputs with the same beginning.", "Memory"
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start.

    Attributes:
        model: Local folder or hub id.
        name: Name of the model in messages. None: `model`.
        model_source: Setting that named the model, for the table of resolved values.
        num_engines: Engines that share the machine. Defaults for cores and chunk memory are divided by it.
        cores: CPU numbers that the engine process may use; None: all. Set for replicas.
        arithmetic: Arithmetic of the C kernels with bfloat16 weights: "bfloat16" or "float32"; None measures both and
            takes the faster one.
        scheduler: Batch and queue limits.
        cache: Memory of sequences that run in chunks.
    """

    model: str
    name: str | None = None
    model_source: str = "--model"
    revision: str | None = setting(
        None, "Branch, tag or commit of a hub id; default: its main branch.", "Model", "REVISION"
    )
    device: str = setting(
        "auto",
        "Device of the model. auto: a GPU if there is one, else the CPU.",
        "Model",
        "{auto,cpu,cuda,cuda:N}",
        rule=_device_rule,
    )
    devices: tuple[str, ...] = setting(
        (),
        "Devices of the model's replicas, one replica on each, which share one queue: cuda:0,cuda:1, or numa:0,numa:1 "
        "for the cores of NUMA nodes. A device named twice runs two replicas. Default: --device.",
        "Model",
        "DEVICE,...",
        rule=_devices_rule,
    )
    data_parallel: int | None = setting(
        None,
        "Replicas of the model. Each is a process with its own GPU or its own cores; default: one for each of "
        "--devices, else one.",
        "Model",
        "N",
        min_value=1,
    )
    dtype: str = setting(
        "auto",
        "Type of weights and products. auto: bfloat16 on CUDA and on CPUs that run it faster, else float32. "
        "int8: faster and less exact, for models that the native kernels run on a CPU with AVX-512 VNNI, AVX-VNNI or "
        "the dot product of ARM.",
        "Model",
        choices=DTYPES,
    )
    max_model_len: int | None = setting(
        None, "Tokens of the longest input; default: the model's own.", "Limits", "TOKENS", min_value=1
    )
    auto_truncate: bool = setting(False, "Cut over-long inputs instead of rejecting them.", "Model")
    empty_input: str = setting(
        "embed",
        "embed: embed an empty or blank text as the tokenizer's special tokens, or as its end token if it adds none. "
        "error: reject it with 400. TEI's routes always reject empty texts.",
        "Model",
        choices=EMPTY_INPUTS,
    )
    matryoshka: str = setting(
        "declared",
        "declared: a request may set `dimensions` if the model's files allow it, or if penstock knows that the model "
        "was trained for shorter vectors. any: every model gives every width up to its own.",
        "Model",
        choices=MATRYOSHKA,
    )
    pooler_config: PoolerConfig = setting(
        PoolerConfig(),
        'Such as {"pooling_type": "CLS", "normalize": false}; default: the values of the model\'s files.',
        "Model",
        "JSON",
        parse=_pooler_config,
    )
    hf_overrides: dict[str, Any] = setting(
        {},
        'Values that replace those of the model\'s config.json. {"classifier_from_token": ["no", "yes"]} makes a '
        'reranker of a language model. Its prompt is {"score_template": {"parts": ["...{instruction}...", '
        '"{query}...{document}", "..."], "instruction": "..."}}, or the prompt of a known reranker: {"score_template": '
        '"qwen3-reranker"}.',
        "Model",
        "JSON",
        parse=json_object,
    )
    mm_processor_kwargs: dict[str, Any] = setting(
        {},
        'Values that replace those of the image processor (preprocessor_config.json). {"max_pixels": 1843200} limits '
        "an image of Qwen3-VL to 1,800 tokens.",
        "Model",
        "JSON",
        parse=json_object,
    )
    adapter: tuple[str, ...] = setting(
        (),
        "LoRA adapters of the model in folders of the peft library. Requests select one as MODEL:NAME.",
        "Model",
        "NAME=FOLDER,...",
        rule=_adapters_rule,
    )
    default_prompt: str | None = setting(
        None,
        "Text put before the texts of requests that select no prompt. Default: that of the model's files. "
        "ColBERT models, and /rerank and /score, use the model's query and document prompts.",
        "Model",
        "TEXT",
    )
    chat_template: str | None = setting(
        None,
        "File with the Jinja template of chats, or the template itself; default: the model's own.",
        "Model",
        "FILE",
        parse=_template,
    )
    trust_remote_code: bool = setting(False, "Run Python code of the model's repository.", "Model")
    num_threads: int | None = setting(
        None,
        "CPU threads of the forward of each replica; default: all cores, divided among models and replicas.",
        "Model",
        "N",
        min_value=1,
        max_value=1024,
    )
    num_engines: int = 1
    cores: tuple[int, ...] | None = None
    cpu_kernels: str = setting(
        "auto",
        "Kernels on a CPU. auto: the native kernels if they are built and support the model, else torch.",
        "Model",
        choices=CPU_KERNELS,
    )
    arithmetic: str | None = None
    cuda_graphs: bool = setting(
        True, "Run small batches of encoders on CUDA with CUDA graphs, which are captured at start.", "Model"
    )
    tokenizer_workers: int = setting(
        2,
        "Threads that tokenize requests of up to 20,000 characters, as many for longer ones, and as many that decode "
        "images.",
        "Model",
        "N",
        min_value=1,
    )
    max_queued_chars: int = setting(
        64_000_000,
        "Characters that may wait for tokenization; a request above the limit is rejected with 429.",
        "Limits",
        "CHARACTERS",
        min_value=1,
    )
    max_image_pixels: int = setting(
        IMAGE_PIXELS,
        "Pixels of the largest image, width times height, which is checked before it is decoded.",
        "Limits",
        "PIXELS",
        min_value=1,
        max_value=MAX_IMAGE_PIXELS,
    )
    image_memory: int = setting(
        IMAGE_MEMORY,
        "Memory for images of this model that are being decoded, such as 512MiB; others wait. An image takes 12 to 20 "
        "bytes per pixel. A larger image is decoded alone. Each process of --api-workers N takes 1/N of it.",
        "Memory",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    in_process: bool = setting(
        False, "Run the engine in a thread of this process instead of a supervised process.", "Model"
    )
    hang_timeout_s: float = setting(
        60.0,
        "Seconds without a response after which the engine process is replaced; 0: never.",
        "Model",
        "SECONDS",
        min_value=0,
    )
    step_timeout_s: float = setting(
        60.0,
        "Seconds after which a forward may count as hung. The engine process is replaced if a forward takes longer "
        "than this and 10 times as long as the longest forward before it; 0: never.",
        "Model",
        "SECONDS",
        min_value=0,
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.arithmetic not in ARITHMETICS:
            raise ValueError(f"arithmetic is {self.arithmetic!r}; it must be float32, bfloat16 or None.")
        check_minimum(self, 1, "num_engines")
