"""What decides which model answers, where, in which numbers, and within which limits of its engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, PositiveInt
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from penstock.engine import CacheConfig, EngineConfig, PoolerConfig, SchedulerConfig
from penstock.engine.protocol.json_text import json_object

from .environment import ENV_PREFIX
from .types import Bytes, Device, Devices, Seconds, Template

_SCHEDULER: Final = SchedulerConfig()
Config = TypeVar("Config", SchedulerConfig, CacheConfig, EngineConfig)


def _pooler_config(value: object) -> PoolerConfig:
    return value if isinstance(value, PoolerConfig) else PoolerConfig.from_dict(json_object(value))


def _config(kind: type[Config], given: dict[str, Any]) -> Config:
    """Returns a configuration with those of its fields that are given."""
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given})


class EngineSettings(BaseSettings):
    """What decides which model answers, where, and in which numbers. Shared by serve, embed and info."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="ignore", frozen=True)

    model: str | None = Field(None, description="Local folder or hub id. Default: the embedded all-MiniLM-L6-v2.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id; default: its main branch.")
    device: Device = Field("auto", description="Where the model runs. auto: on a GPU where there is one.")
    devices: Devices = Field(
        (),
        description=(
            "Where replicas of the model run, one on each, behind one queue: cuda:0,cuda:1, or numa:0,numa:1 for the "
            "cores of NUMA nodes. Default: --device."
        ),
    )
    data_parallel: PositiveInt | None = Field(
        None,
        description=(
            "Replicas of the model, each a process on a GPU or on cores of its own; default: one for each of "
            "--devices, else one."
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description=(
            "Type of weights and products. auto: bfloat16 where that is measured to be faster, else float32. int8: "
            "faster and less exact, for what the native kernels run on a CPU with AVX-512 VNNI or AVX-VNNI."
        ),
    )
    max_model_len: PositiveInt | None = Field(None, description="Longest input; default: the model's own.")
    auto_truncate: bool = Field(False, description="Cut over-long inputs instead of refusing them.")
    empty_input: Literal["embed", "error"] = Field(
        "embed",
        description=(
            "embed: a text that is empty or white space is read as the tokens around a text, or as the token that ends "
            "one where there are none. error: it is refused with 400. TEI's own routes refuse empty texts always."
        ),
    )
    max_num_batched_tokens: PositiveInt | None = Field(
        None,
        description="Tokens in one forward; default: 2,048 on CPU, 16,384 on CUDA, 32,768 on GPUs of 40 GB or more.",
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="Sequences in one forward; default: 512 on CPU, 2,048 on CUDA."
    )
    max_queued_tokens: PositiveInt = Field(
        _SCHEDULER.max_queued_tokens,
        description="Tokens that wait or run at which new requests are refused with 429. No request may have more.",
    )
    max_queue_s: Seconds = Field(
        _SCHEDULER.max_queue_s,
        description=(
            "Seconds of work that waits or runs at which new requests are refused with 429. One request counts for at "
            "most a sixteenth of it, and eight larger requests are always accepted. For interactive use set less, such "
            "as 6; 0: no limit."
        ),
    )
    max_queued_chars: PositiveInt = Field(
        64_000_000, description="Characters that may wait for tokenization; requests beyond are refused whole with 429."
    )
    enable_chunked_prefill: bool = Field(
        True, description="Cut long inputs of models that look back only into chunks, so that short ones need not wait."
    )
    chunk_size: PositiveInt | None = Field(
        None,
        description=(
            "Tokens of a chunk of models that look back only; default: adapts to the speed of the device and to what "
            "else waits."
        ),
    )
    kv_cache_memory: Bytes | None = Field(
        None,
        description=(
            "Memory of models that look back only, for inputs that run in chunks and for cached prefixes, such as 2GiB "
            "or 500MB; default: --cache-memory-fraction of what is free. Where it holds fewer tokens than the model's "
            "longest input, inputs are limited to what it holds."
        ),
    )
    cache_memory_fraction: float = Field(
        0.25, gt=0, le=1, description="Share of the free memory for --kv-cache-memory."
    )
    kv_block_size: PositiveInt = Field(16, description="Tokens of a block of that memory.")
    enable_prefix_caching: bool = Field(True, description="Reuse what inputs that begin alike have in common.")
    pooler_config: Annotated[PoolerConfig, NoDecode, PlainValidator(_pooler_config)] = Field(
        PoolerConfig(),
        description='Such as {"pooling_type": "CLS", "normalize": false}; default: what the model\'s files say.',
    )
    hf_overrides: Annotated[dict[str, Any], NoDecode, BeforeValidator(json_object)] = Field(
        {},
        description=(
            "Values laid over the model's config.json. A language model becomes a reranker with "
            '{"classifier_from_token": ["no", "yes"]}, and reads pairs in the prompt of {"score_template": {"parts": '
            '["...{instruction}...", "{query}...{document}", "..."], "instruction": "..."}} or of a known reranker: '
            '{"score_template": "qwen3-reranker"}.'
        ),
    )
    chat_template: Template | None = Field(
        None, description="File with the Jinja template of chats, or the template itself; default: the model's own."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    num_threads: PositiveInt | None = Field(
        None,
        le=1024,
        description="CPU threads of the forward; default: all cores, divided among models and replicas.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What computes on a CPU. auto: native kernels that are built and know the model, else torch.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On CUDA, record the forwards of small batches of encoders at start, and replay them as a whole.",
    )
    tokenizer_workers: PositiveInt = Field(2, description="Threads that tokenize.")
    in_process: bool = Field(False, description="Run the engine in this process instead of a supervised one.")
    hang_timeout_s: Seconds = Field(
        60.0, description="Seconds without a sign of life after which the engine process is replaced; 0: never."
    )
    step_timeout_s: Seconds = Field(
        60.0,
        description=(
            "Seconds that a forward may always take. One that takes longer, and 10 times as long as the longest "
            "forward before it, counts as hung, and the engine process is replaced; 0: never."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: Literal["console", "json"] = Field("console", description="Log lines for people or for machines.")

    def engine_config(self, model: str, name: str | None = None, *, num_engines: int = 1) -> EngineConfig:
        """Returns the engine's configuration.

        Args:
            model: Local folder or hub id.
            name: What messages call it.
            num_engines: Engines that share the machine.
        """
        given = {field: getattr(self, field) for field in EngineSettings.model_fields} | {
            "model": model,
            "name": name,
            "num_engines": num_engines,
            "model_source": "default" if self.model is None else "--model",
            "max_queue_s": self.max_queue_s or math.inf,
            "kv_cache_memory": None if self.kv_cache_memory is None else int(self.kv_cache_memory),
            "memory_fraction": self.cache_memory_fraction,
            "block_size": self.kv_block_size,
        }
        given |= {"scheduler": _config(SchedulerConfig, given), "cache": _config(CacheConfig, given)}
        return _config(EngineConfig, given)
