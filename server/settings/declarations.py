"""Declares the settings of each command. The settings of an engine are declared in engine/protocol/config.py."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from penstock.engine import EngineConfig
from penstock.engine.protocol.setting import REQUIRED, check_settings, parse_size, setting

from .compat_variables import COMPAT_SERVERS
from .load import UsageError, split_list

GROUPS: Final = (
    "Input and output",
    "Model",
    "Limits",
    "HTTP",
    "Several models",
    "Batches",
    "Memory",
    "Cluster",
    "Logging",
    "Load test",
)
"""Groups of settings in the order of the help text."""
_HOST: Final = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_ORIGIN: Final = re.compile(r"https?://[^\s/?#@]+")


def _parse_keys(value: object) -> tuple[str, ...]:
    """Raises ValueError for an empty list: the server would be open by mistake."""
    keys = split_list(value)
    if not keys:
        raise ValueError("has no key; set a key, or leave it out to serve without keys")
    return keys


def read_key_file(path: Path) -> list[str]:
    """Returns the API keys of a file: one per line, without empty lines and comments. Raises OSError and ValueError."""
    lines = (line.strip() for line in path.read_text("utf-8-sig").splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError("has no key; add one per line")
    return keys


def _parse_names(value: object) -> tuple[str, ...]:
    names = split_list(value)
    if not names:
        raise ValueError("has no name; set a name, or leave it out to use the model's own name")
    return names


def _origins_rule(value: tuple[str, ...]) -> str | None:
    """Returns an error for a value that no browser sends as origin: it would never match."""
    wrong = next((origin for origin in value if origin != "*" and not _ORIGIN.fullmatch(origin)), None)
    if wrong is None:
        return None
    return f"must be origins; {wrong!r} is not an origin: write https://host or http://host:port, or * for all"


def _hosts_rule(value: tuple[str, ...]) -> str | None:
    wrong = next((host for host in value if not _is_allowed_host(host)), None)
    if wrong is None:
        return None
    return f"must be host names; {wrong!r} is none: write cdn.example.org, *.example.org or cdn.example.org:8443"


def _is_allowed_host(text: str) -> bool:
    name, _, port = text.lower().partition(":")
    return bool(_HOST.fullmatch(name)) and (not port or (port.isascii() and port.isdigit() and 0 < int(port) < 65536))


def _path_rule(value: str) -> str | None:
    return None if re.fullmatch(r"(/[\w.~-]+)*", value, re.ASCII) else "must begin with / and not end with /"


def _url_rule(value: str) -> str | None:
    return None if re.match(r"https?://[^\s/]", value) else "must begin with http:// or https:// and name a host"


def _parse_counts(value: object) -> tuple[int, ...]:
    return tuple(map(int, _parse_numbers(value, is_whole=True)))


def _parse_rates(value: object) -> tuple[float, ...]:
    return _parse_numbers(value, is_whole=False)


def _parse_numbers(value: object, *, is_whole: bool) -> tuple[float, ...]:
    """Raises ValueError for an empty list, for other texts than numbers, and for numbers that are not above 0."""
    try:
        numbers = tuple((int if is_whole else float)(part) for part in split_list(value))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < 1e6 for number in numbers):
        raise ValueError(f"must be {'whole ' * is_whole}numbers above 0 and below 1000000, such as 1,4,16")
    return numbers


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """Settings of all commands with a model.

    Attributes:
        engine: The settings of its engine, without the model; see `engine_config`.
    """

    model: str | None = setting(
        None, "Local folder or hub id. Default: the embedded all-MiniLM-L6-v2.", "Model", "MODEL"
    )
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
    log_level: str = setting(
        "info", "Minimum level of log messages.", "Logging", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting("console", "Format of log lines: text or JSON.", "Logging", choices=("console", "json"))

    def __post_init__(self) -> None:
        check_settings(self)

    def engine_config(self, model: str, name: str | None = None) -> EngineConfig:
        """Returns the engine's configuration.

        Args:
            model: Local folder or hub id.
            name: Name of the model in messages.
        """
        return replace(self.engine, model=model, name=name, model_source="default" if self.model is None else "--model")


@dataclass(frozen=True, kw_only=True)
class InfoSettings(CommandSettings):
    """Settings of `penstock info`."""


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(CommandSettings):
    """Settings of `penstock embed`."""

    output: str = setting(REQUIRED, "File to write: .parquet, .jsonl, .csv, .tsv or .npy.", "Input and output", "FILE")
    overwrite: bool = setting(False, "Replace an existing output.", "Input and output")
    field: str = setting("text", "JSONL field, or CSV or Parquet column, with the text.", "Input and output", "NAME")
    image_field: str | None = setting(
        None,
        "JSONL field, or CSV or Parquet column, with the image to embed instead of a text: the bytes of a file, a path "
        "relative to FILE, or a data URI.",
        "Input and output",
        "NAME",
    )
    batch_size: int = setting(
        512, "Maximum number of rows in the engine at once.", "Input and output", "ROWS", min_value=1
    )
    on_bad_row: str = setting(
        "fail",
        "If a row cannot be read, has no text, or is rejected by the model: stop with an error, or skip the row and "
        "list it in OUTPUT.skipped.jsonl.",
        "Input and output",
        choices=("fail", "skip"),
    )
    dimensions: int | None = setting(
        None,
        "Number of dimensions (Matryoshka); default: all dimensions of the model.",
        "Input and output",
        "N",
        min_value=1,
    )
    normalize: bool | None = setting(None, "L2-normalise; default: as the model's files state.", "Input and output")
    prompt_name: str | None = setting(
        None, "Name of a prompt of the model, which is put before every text.", "Input and output", "NAME"
    )

    def row_options(self) -> dict[str, Any]:
        """Returns the options that affect the output of a job. A job continues only with the same options."""
        names = ("field", "image_field", "dimensions", "normalize", "prompt_name")
        options = {name: getattr(self, name) for name in names}
        return options | ({"adapter": list(self.engine.adapter)} if self.engine.adapter else {})


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Settings of the commands that send requests to a running server: `penstock bench` and `penstock eval`."""

    model: str | None = setting(
        None,
        "Name of the model in requests. Default: the first model for the task that the server lists.",
        "Model",
        "NAME",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "API key of the server; of several keys the first is sent. Default: the first key of --api-key-file, or the "
        "variable OPENAI_API_KEY, or none.",
        "HTTP",
        "KEY",
        parse=_parse_keys,
        is_secret=True,
    )
    api_key_file: Path | None = setting(
        None, "File with the API key in its first line; may be the file of the server.", "HTTP", "FILE"
    )
    ca_file: Path | None = setting(
        None,
        "PEM file with further certificates to trust for https://, such as a self-signed one.",
        "HTTP",
        "FILE",
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def key(self) -> str:
        """Returns the API key; "" for none.

        Raises:
            UsageError: The key file cannot be read or is empty.
        """
        if self.api_key:
            return self.api_key[0]
        if self.api_key_file is None:
            return os.environ.get("OPENAI_API_KEY", "")
        try:
            return read_key_file(self.api_key_file)[0]
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file: {self.api_key_file} cannot be read or is empty: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EvalSettings(TargetSettings):
    """Settings of `penstock eval`."""

    mteb: tuple[str, ...] = setting(
        (),
        "Names of tasks of MTEB to run, such as STSBenchmark (extra `mteb`). MTEB downloads their data from the hub.",
        "Input and output",
        "TASK,...",
    )
    rerank: str | None = setting(
        None, "Name of a served model that reranks the documents found by retrieval.", "Input and output", "NAME"
    )
    rerank_top_k: int = setting(
        100, "Number of documents per query that --rerank sorts.", "Input and output", "N", min_value=1
    )
    dimensions: int | None = setting(
        None,
        "Number of dimensions (Matryoshka); default: all dimensions of the model.",
        "Input and output",
        "N",
        min_value=1,
    )
    texts_per_request: int = setting(64, "Texts or documents in one request.", "HTTP", "N", min_value=1)
    concurrency: int = setting(4, "Requests in flight.", "HTTP", "N", min_value=1, max_value=256)


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CommandSettings):
    """Settings of `penstock serve`.

    Attributes:
        env_notes: Log lines about the variables of --env-compat.
    """

    env_notes: tuple[str, ...] = ()
    config: Path | None = setting(
        None,
        "TOML file with settings and the models to serve; `penstock config` prints a template.",
        "Model",
        "FILE",
    )
    env_compat: str | None = setting(
        None,
        "Also read the environment variables of Text Embeddings Inference or Infinity, such as MODEL_ID or "
        "INFINITY_MODEL_ID. The log lists them. Flags and variables of penstock have precedence.",
        "Model",
        choices=COMPAT_SERVERS,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names under which the model is served. Responses contain the first one. Default: the model's name.",
        "Model",
        "NAME,...",
        parse=_parse_names,
    )
    default_prompt_name: str | None = setting(
        None,
        "Name of a prompt of the model. It is put before the texts of embedding requests that name no prompt (also of "
        "TEI's /embed and /similarity), and before inputs, labels and examples of /classify with an embedding model. "
        "/rerank and /score use the model's own query and document prompts.",
        "Model",
        "NAME",
    )
    max_inputs_per_request: int = setting(
        4096, "Maximum number of texts, documents or pairs in one request.", "Limits", "N", min_value=1
    )
    max_body_bytes: int = setting(
        16 * 1024 * 1024, "Maximum size of a request body.", "Limits", "SIZE", exclusive_min=0, parse=parse_size
    )
    max_image_bytes: int = setting(
        16 * 1024 * 1024,
        "Maximum size of the file of one image.",
        "Limits",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    max_images_per_request: int = setting(512, "Maximum number of images in one request.", "Limits", "N", min_value=1)
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "Hosts from which the server fetches images that requests name by an https URL, such as "
        "cdn.example.org,*.example.org or cdn.example.org:8443. Default: images are accepted as data URIs only.",
        "HTTP",
        "HOST,...",
        rule=_hosts_rule,
    )
    max_json_values: int = setting(
        2_000_000,
        "Maximum number of JSON values in one request body. A text, list, object or key counts as 8, others as 1.",
        "Limits",
        "N",
        min_value=1,
    )
    unknown_fields: str = setting(
        "warn",
        "If a request body has a field that no client API of the path knows: ignore it and report it in the header "
        "x-ignored-fields, in the log and in a metric; reject the request with 400; or ignore the field silently. "
        "Misspelt fields and fields that other paths have are always rejected.",
        "HTTP",
        choices=("warn", "reject", "ignore"),
    )
    min_transfer_rate: int = setting(
        16 * 1024,
        "Minimum rate, in bytes per second such as 16KiB, at which clients must send a body or read a response. "
        "A slower body is rejected with 408; the connection of a slower response is reset. 0: no limit.",
        "Limits",
        "SIZE",
        min_value=0,
        parse=parse_size,
    )
    transfer_grace_s: float = setting(
        30.0,
        "Seconds by which a client may be behind --min-transfer-rate, for example after a pause.",
        "Limits",
        "SECONDS",
        exclusive_min=0,
    )
    request_timeout_s: float = setting(
        600.0, "Seconds after which a request fails with 504; 0: never.", "Limits", "SECONDS", min_value=0
    )
    drain_timeout_s: float = setting(
        30.0,
        "Seconds for running requests to finish after SIGTERM; 0: stop at once.",
        "Limits",
        "SECONDS",
        min_value=0,
    )
    host: str = setting("0.0.0.0", "Address to listen on.", "HTTP", "ADDRESS")
    port: int = setting(8000, "Port to listen on; 0: a free port.", "HTTP", "PORT", min_value=0, max_value=65535)
    metrics_port: int | None = setting(
        None,
        "Port for /metrics and the health checks in plain HTTP, also with TLS on --port; 0: a free port. /metrics is "
        "then absent from --port. Default: /metrics is on --port.",
        "HTTP",
        "PORT",
        min_value=0,
        max_value=65535,
    )
    metrics_host: str | None = setting(
        None, "Address of --metrics-port. Default: the address of --host.", "HTTP", "ADDRESS"
    )
    root_path: str = setting(
        "",
        "Path under which a reverse proxy serves the routes, such as /penstock. Requests with and without it are "
        "accepted; the OpenAPI document has it as server.",
        "HTTP",
        "PATH",
        rule=_path_rule,
    )
    api_workers: int = setting(
        1,
        "Number of HTTP processes that share the port and the engines. Each has its own tokenizer.",
        "HTTP",
        "N",
        min_value=1,
        max_value=256,
    )
    api_key: tuple[str, ...] = setting(
        (), "API keys for data routes. Default: no key is needed.", "HTTP", "KEY,...", parse=_parse_keys, is_secret=True
    )
    api_key_file: Path | None = setting(
        None,
        "File with more keys, one per line; # starts a comment line. It is read again when it changes.",
        "HTTP",
        "FILE",
    )
    admin_key: tuple[str, ...] = setting(
        (),
        "Keys for POST /models/load and /models/unload. Default: these routes are off.",
        "HTTP",
        "KEY,...",
        parse=_parse_keys,
        is_secret=True,
    )
    admin_key_file: Path | None = setting(
        None, "File with more admin keys, in the format of --api-key-file.", "HTTP", "FILE"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may call the server, such as https://app.example.com; *: all.",
        "HTTP",
        "ORIGIN,...",
        rule=_origins_rule,
    )
    operator_routes: bool = setting(
        False,
        "Enable the operator routes /tokenizer_info, /server_info and POST /reset_prefix_cache. "
        "They need an API key if keys are configured.",
        "HTTP",
    )
    ssl_certfile: Path | None = setting(
        None, "PEM file with the certificate and its chain. Enables HTTPS.", "HTTP", "FILE"
    )
    ssl_keyfile: Path | None = setting(
        None, "PEM file with the private key, without a password. Default: the key in --ssl-certfile.", "HTTP", "FILE"
    )
    max_loaded_models: int | None = setting(
        None,
        "Maximum number of models in memory. Other models are loaded when a request names them; "
        "then the least recently used model is unloaded. Default: no limit.",
        "Several models",
        "N",
        min_value=1,
    )
    model_memory: int | None = setting(
        None,
        "Maximum memory of all models together, such as 8GiB. "
        "Above it, models are unloaded as with --max-loaded-models. Default: no limit.",
        "Several models",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    load_wait_s: float = setting(
        60.0,
        "Maximum seconds that a request waits for its model to load. After that it gets a 503, and the client"
        " may retry.",
        "Several models",
        "SECONDS",
        min_value=0,
    )
    data_dir: Path | None = setting(
        None,
        "Folder for uploaded files and batches; enables /v1/files and /v1/batches. Only one server may use "
        "it. Default: off.",
        "Batches",
        "FOLDER",
    )
    max_file_bytes: int = setting(
        200 * 1024 * 1024, "Maximum size of an uploaded file.", "Batches", "SIZE", exclusive_min=0, parse=parse_size
    )
    max_files: int = setting(
        10_000,
        "Maximum number of files of one API key, and of its completed batches that are kept.",
        "Batches",
        "N",
        min_value=1,
    )
    batch_share: float = setting(
        0.02,
        "Share of the time for lines of batches under a constant load of client requests.",
        "Batches",
        "SHARE",
        exclusive_min=0,
        max_value=1,
    )
    batch_memory: int = setting(
        64 * 1024 * 1024,
        "Maximum total size of the running lines of all batches. A longer line runs alone.",
        "Batches",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    batch_retention_s: int = setting(
        30 * 24 * 3600,
        "Seconds after its end after which a batch and its input, output and error files are removed.",
        "Batches",
        "SECONDS",
        min_value=1,
    )
    response_memory: int = setting(
        512 * 1024 * 1024,
        "Memory for all responses that are computed or sent. While it is full, requests with large responses are "
        "rejected with 429. One client may use half of it.",
        "Memory",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    cache: int | None = setting(
        None,
        "Memory for a cache of embeddings, such as 1GiB. It serves requests with the same text, options and API key.",
        "Memory",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    cache_dir: Path | None = setting(
        None,
        "Folder on a local disk for a persistent cache of embeddings (extra `cache`). Several servers on one "
        "machine may "
        "share it.",
        "Memory",
        "FOLDER",
    )
    cache_dir_size: int = setting(
        10 * 1024**3,
        "Maximum size of a new --cache-dir. An existing one keeps its size.",
        "Memory",
        "SIZE",
        exclusive_min=0,
        parse=parse_size,
    )
    access_log: bool = setting(False, "Log one line per request, with the times of its stages.", "Logging")
    otlp_traces_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that receives traces (extra `otel`), such as http://localhost:4318.",
        "Logging",
        "URL",
        rule=_url_rule,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A table [[models]] of the file: the settings of one model.

    Attributes:
        engine: As in CommandSettings.
    """

    model: str | None = setting(None, "Local folder or hub id.", "Model", "MODEL")
    name: str | None = setting(None, "Name in responses; default: the model's own name.", "Model", "NAME")
    aliases: tuple[str, ...] = setting((), "Additional names for requests.", "Model", "NAME,...")
    preload: bool | None = setting(
        None, "Load the model at the start. Default: yes for the first --max-loaded-models models.", "Model"
    )
    pin: bool = setting(False, "Never unload the model to free memory for other models.", "Model")
    ttl: float | None = setting(
        None,
        "Seconds without a request after which the model is unloaded. Default: never.",
        "Model",
        "SECONDS",
        min_value=0,
    )
    default_prompt_name: str | None = setting(
        None, "Overrides the server's setting of the same name for this model.", "Model", "NAME"
    )
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))


@dataclass(frozen=True, kw_only=True)
class BenchSettings(TargetSettings):
    """Settings of `penstock bench`."""

    dialect: str = setting(
        "auto",
        "API of the requests; auto: the first of openai, tei and ollama whose list of models the server has. "
        "openai also fits vLLM and Infinity.",
        "Load test",
        choices=("auto", "openai", "tei", "cohere", "ollama"),
    )
    task: str = setting("embed", "Kind of requests.", "Load test", choices=("embed", "rerank", "classify"))
    load: str = setting(
        "queries",
        "Texts: queries (10 words), documents (200 words), mixed (1 word to --max-words), or a file with one text per "
        "line; lines of .jsonl files have a field `text`.",
        "Load test",
        "LOAD",
    )
    max_words: int = setting(
        240,
        "Maximum length of the texts of queries, documents and mixed. Most words are one token; the default fits "
        "models with 256 tokens.",
        "Load test",
        "WORDS",
        min_value=1,
    )
    batch_size: int = setting(
        1, "Texts in each request, or documents in a rerank request.", "Load test", "TEXTS", min_value=1
    )
    connections: tuple[int, ...] = setting(
        (1, 4, 16, 64),
        "Numbers of concurrent requests, measured one after the other. With --rate, the maximum counts. "
        "Default: 1,4,16,64.",
        "Load test",
        "N,...",
        parse=_parse_counts,
    )
    rate: tuple[float, ...] = setting(
        (),
        "Requests per second of an open loop with Poisson arrivals, measured one after the other. Default: a closed "
        "loop, in which each connection waits for its response.",
        "Load test",
        "RATE,...",
        parse=_parse_rates,
    )
    seconds: float = setting(5.0, "Duration of a round.", "Load test", "SECONDS", exclusive_min=0)
    warm_up: float = setting(
        1.0, "Duration of the same load before each round, not counted.", "Load test", "SECONDS", min_value=0
    )
    rounds: int = setting(
        3, "Rounds of each load. Two servers take turns and alternate their order.", "Load test", "N", min_value=1
    )
    encoding_format: str = setting(
        "float", "Format of vectors in the dialects openai and cohere.", "Load test", choices=("float", "base64")
    )
    timeout: float = setting(
        120.0, "Seconds after which a request counts as failed.", "Load test", "SECONDS", exclusive_min=0
    )
    json: Path | None = setting(None, "File for the results of every round as JSON.", "Input and output", "FILE")
    plot: Path | None = setting(
        None,
        "Image of latency against throughput, such as .png or .svg (extra `plot`).",
        "Input and output",
        "FILE",
    )
