"""Every setting of the command line and of the environment, with its type, its default and its help text.

The only reader of environment variables: field `max_model_len` is the flag `--max-model-len` and the variable
PENSTOCK_MAX_MODEL_LEN. A flag wins over a variable, a variable over the default. Starts nothing and imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, ByteSize, Field, PlainValidator, PositiveInt, ValidationInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from penstock.engine import CacheConfig, EngineConfig, PoolerConfig, SchedulerConfig
from penstock.engine.protocol.pooler_config import json_object

from .setting_types import Bytes, Device, Devices, Origins, Seconds, ServedNames, Template, Url, listed

ENV_PREFIX: Final = "PENSTOCK_"
Config = TypeVar("Config", SchedulerConfig, CacheConfig, EngineConfig)


class CommandError(Exception):
    """The command could not do its work; the message is one line that says what to do."""

    exit_code = 1


class UsageError(CommandError):
    """The command line or the environment holds a wrong value."""

    exit_code = 2


def _pooler_config(value: object) -> PoolerConfig:
    return value if isinstance(value, PoolerConfig) else PoolerConfig.from_dict(json_object(value))


def _keys(value: object, info: ValidationInfo) -> object:
    """Refuses keys that were given but are none: the server would be open to everyone by mistake."""
    keys = listed(value)
    # The default arrives here too, where env_ignore_empty has hidden an empty variable.
    if not keys and (value != () or environment_variable(str(info.field_name)) in os.environ):
        raise ValueError("holds no key; give a key, or leave it out to serve without keys")
    return keys


Keys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_keys)]


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
        None, description="Tokens in one forward; default: 2,048 on CPU, 16,384 on CUDA."
    )
    max_num_seqs: PositiveInt = Field(512, description="Sequences in one forward.")
    max_queued_tokens: PositiveInt = Field(
        4_000_000,
        description="Tokens that wait or run, from which on requests are refused with 429. No request may have more.",
    )
    max_queue_s: Seconds = Field(
        6.0,
        description=(
            "Seconds that what waits or runs takes, from which on requests are refused with 429; a request counts for "
            "an eighth of them at most, and two larger ones are taken. For bulk use more, such as 600; 0: never."
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
    tokenizer_workers: PositiveInt = Field(2, description="Threads that tokenize.")
    in_process: bool = Field(False, description="Run the engine in this process instead of a supervised one.")
    hang_timeout_s: Seconds = Field(
        60.0, description="Seconds without a sign of life after which the engine process is replaced; 0: never."
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


class ServerSettings(EngineSettings):
    """Settings of `penstock serve`."""

    config: Path | None = Field(
        None,
        description="TOML file of settings, and of the models to serve; `penstock config` prints one to begin with.",
    )
    max_loaded_models: PositiveInt | None = Field(
        None,
        description=(
            "Models in memory at once, of several that are served; the others are loaded when a request names them, "
            "and the one that was not used for longest goes. Default: all."
        ),
    )
    model_memory: Bytes | None = Field(
        None, description="Memory of all models together, such as 8GiB; beyond it the same happens. Default: no bound."
    )
    load_wait_s: Seconds = Field(
        60.0, description="Seconds that a request waits for its model to be loaded; then 503, and the client may retry."
    )
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_workers: PositiveInt = Field(
        1,
        le=256,
        description="HTTP processes that share the port and the engines, each with a tokenizer of its own.",
    )
    served_model_name: ServedNames = Field(
        (),
        description="Names under which the model is served; the first one is shown. Default: its own.",
    )
    api_key: Keys = Field((), repr=False, description="Keys that data routes require. Default: open.")
    api_key_file: Path | None = Field(
        None, description="File of more keys, one a line; # begins a comment line. It is read again when it changes."
    )
    admin_key: Keys = Field(
        (), repr=False, description="Keys for POST /models/load and /models/unload. Default: no such routes."
    )
    cors_origins: Origins = Field(
        (), description="Origins whose web pages may call the server, such as https://app.example.com; *: all."
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file of the certificate and its chain: the server then speaks HTTPS."
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of its private key, without a password; default: in --ssl-certfile."
    )
    cache: Bytes | None = Field(
        None,
        description=(
            "Memory of a cache of embeddings, such as 1GiB; default: none. The same text, asked for in the same way "
            "with the same key, is then not computed again."
        ),
    )
    cache_dir: Path | None = Field(
        None,
        description=(
            "Folder on a local disk for such a cache that outlives the server and is shared by all servers of this "
            "machine that name it (extra `cache`)."
        ),
    )
    cache_dir_size: Bytes = Field(
        ByteSize(10 * 1024**3), description="Most that a new --cache-dir holds; one that is there keeps its size."
    )
    max_body_bytes: PositiveInt = Field(64 * 1024 * 1024, description="Largest request body.")
    max_json_values: PositiveInt = Field(
        2_000_000,
        description=(
            "Numbers and words, such as token ids, in one request body; a text, list, object or key counts as 8."
        ),
    )
    answer_memory: Bytes = Field(
        ByteSize(512 * 1024 * 1024),
        description="Memory of all answers under way; while it is full, requests for large ones are refused with 429.",
    )
    max_inputs_per_request: PositiveInt = Field(4096, description="Texts, documents or pairs in one request.")
    request_timeout_s: Seconds = Field(
        600.0, description="Seconds after which a request is given up with 504; 0: never."
    )
    drain_timeout_s: Seconds = Field(
        30.0, description="Seconds that running requests get to finish after SIGTERM or SIGHUP; 0: none."
    )
    operator_routes: bool = Field(
        False,
        description=(
            "Serve /tokenizer_info, /server_info and POST /reset_prefix_cache, for whoever runs the server. They need "
            "an API key where there are any."
        ),
    )
    data_dir: Path | None = Field(
        None,
        description=(
            "Folder of uploaded files and of batches (/v1/files, /v1/batches), for this server alone. Default: off."
        ),
    )
    batch_share: float = Field(
        0.02, gt=0, le=1, description="Share of the time that lines of batches take while clients ask for answers."
    )
    max_file_bytes: Bytes = Field(ByteSize(200 * 1024 * 1024), description="Largest file that may be uploaded.")
    access_log: bool = Field(False, description="Log a line for each request, with the time of its stages.")
    otlp_traces_endpoint: Url | None = Field(
        None, description="OpenTelemetry collector that gets traces (extra `otel`), such as http://localhost:4318."
    )
    default_prompt_name: str | None = Field(
        None,
        description=(
            "Named prompt of the model that is put before the texts of /v1/embeddings when a request names none, and "
            "before inputs, labels and examples of /classify with an embedding model. /rerank and /score keep the "
            "model's own query and document prompts."
        ),
    )


class EmbedSettings(EngineSettings):
    """Settings of `penstock embed`."""

    output: str = Field(description="File to write: .parquet, .jsonl or .npy.")
    overwrite: bool = Field(False, description="Replace an output that exists.")
    field: str = Field("text", description="JSONL or Parquet field that holds the text.")
    batch_size: PositiveInt = Field(
        512, description="Rows in flight at once; a killed run loses none that was answered."
    )
    dimensions: PositiveInt | None = Field(
        None, description="Width of the embeddings (Matryoshka); default: the model's own."
    )
    normalize: bool | None = Field(None, description="L2-normalise; default: as the model's files say.")
    prompt_name: str | None = Field(None, description="Named prompt of the model that is put before every text.")


class InfoSettings(EngineSettings):
    """Settings of `penstock info`."""


def is_in_environment(field: str) -> bool:
    """Returns whether the environment sets a field; empty variables do not."""
    return bool(os.environ.get(environment_variable(field)))


def environment_variable(field: str) -> str:
    """Returns the environment variable of a settings field."""
    return ENV_PREFIX + field.upper()


def unknown_variables() -> list[str]:
    """Returns the PENSTOCK_ variables of the environment that no setting reads, such as misspelt ones."""
    fields = {field for cls in (ServerSettings, EmbedSettings) for field in cls.model_fields}
    known = {environment_variable(field) for field in fields}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
