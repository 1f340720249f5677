"""Declares the settings of each command. The settings of an engine are declared in engine/protocol/config.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from penstock.engine import EngineConfig
from penstock.engine.protocol.setting import REQUIRED, check_settings, parse_size, setting

from .load import split_list

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
)
"""Headings of the help, in their order."""
_ORIGIN: Final = re.compile(r"https?://[^\s/?#@]+")


def _parse_keys(value: object) -> tuple[str, ...]:
    """Refuses an empty list that was given: the server would be open to everyone by mistake."""
    keys = split_list(value)
    if not keys:
        raise ValueError("holds no key; give a key, or leave it out to serve without keys")
    return keys


def _parse_names(value: object) -> tuple[str, ...]:
    names = split_list(value)
    if not names:
        raise ValueError("holds no name; give a name, or leave it out to serve the model under its own")
    return names


def _origins_rule(value: tuple[str, ...]) -> str | None:
    """Refuses a value that no browser sends as its origin: it would never match."""
    wrong = next((origin for origin in value if origin != "*" and not _ORIGIN.fullmatch(origin)), None)
    if wrong is None:
        return None
    return f"must be origins; {wrong!r} is no origin: write https://host or http://host:port, or * for all"


def _url_rule(value: str) -> str | None:
    return None if re.match(r"https?://[^\s/]", value) else "must begin with http:// or https:// and name a host"


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
        "info", "Least severe level logged.", "Logging", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "console", "Log lines for people or for machines.", "Logging", choices=("console", "json")
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
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

    output: str = setting(REQUIRED, "File to write: .parquet, .jsonl or .npy.", "Input and output", "FILE")
    overwrite: bool = setting(False, "Replace an output that exists.", "Input and output")
    field: str = setting("text", "JSONL or Parquet field that holds the text.", "Input and output", "NAME")
    batch_size: int = setting(512, "Rows in flight at once.", "Input and output", "ROWS", least=1)
    on_bad_row: str = setting(
        "fail",
        "For a row that cannot be read, holds no text, or is refused by the model: fail with its line, or skip it and "
        "list it in OUTPUT.skipped.jsonl.",
        "Input and output",
        choices=("fail", "skip"),
    )
    dimensions: int | None = setting(
        None, "Width of the embeddings (Matryoshka); default: the model's own.", "Input and output", "N", least=1
    )
    normalize: bool | None = setting(None, "L2-normalise; default: as the model's files say.", "Input and output")
    prompt_name: str | None = setting(
        None, "Named prompt of the model, put before every text.", "Input and output", "NAME"
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CommandSettings):
    """Settings of `penstock serve`."""

    config: Path | None = setting(
        None,
        "TOML file of settings, and of the models to serve; `penstock config` prints one to begin with.",
        "Model",
        "FILE",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names under which the model is served; the first one is shown. Default: its own.",
        "Model",
        "NAME,...",
        parse=_parse_names,
    )
    default_prompt_name: str | None = setting(
        None,
        "Named prompt of the model that is put before the texts of /v1/embeddings when a request names none, and "
        "before inputs, labels and examples of /classify with an embedding model. /rerank and /score keep the model's "
        "own query and document prompts.",
        "Model",
        "NAME",
    )
    max_inputs_per_request: int = setting(4096, "Texts, documents or pairs in one request.", "Limits", "N", least=1)
    max_body_bytes: int = setting(
        16 * 1024 * 1024, "Largest request body.", "Limits", "SIZE", above=0, parse=parse_size
    )
    max_json_values: int = setting(
        2_000_000,
        "Numbers and words, such as token ids, in one request body; a text, list, object or key counts as 8.",
        "Limits",
        "N",
        least=1,
    )
    min_transfer_rate: int = setting(
        16 * 1024,
        "Lowest rate, in bytes per second such as 16KiB, at which clients may send a body or read a response. A slower "
        "body is refused with 408; the connection of a slower response is reset. 0: any rate.",
        "Limits",
        "SIZE",
        least=0,
        parse=parse_size,
    )
    transfer_grace_s: float = setting(
        30.0,
        "Seconds that a client may take longer than at --min-transfer-rate, for example for a pause.",
        "Limits",
        "SECONDS",
        above=0,
    )
    request_timeout_s: float = setting(
        600.0, "Seconds after which a request fails with 504; 0: never.", "Limits", "SECONDS", least=0
    )
    drain_timeout_s: float = setting(
        30.0,
        "Seconds that running requests get to finish after SIGTERM or SIGHUP; 0: none.",
        "Limits",
        "SECONDS",
        least=0,
    )
    host: str = setting("0.0.0.0", "Address to listen on.", "HTTP", "ADDRESS")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", "HTTP", "PORT", least=0, most=65535)
    api_workers: int = setting(
        1,
        "HTTP processes that share the port and the engines, each with a tokenizer of its own.",
        "HTTP",
        "N",
        least=1,
        most=256,
    )
    api_key: tuple[str, ...] = setting(
        (), "Keys that data routes require. Default: open.", "HTTP", "KEY,...", parse=_parse_keys, is_secret=True
    )
    api_key_file: Path | None = setting(
        None,
        "File of more keys, one a line; # begins a comment line. It is read again when it changes.",
        "HTTP",
        "FILE",
    )
    admin_key: tuple[str, ...] = setting(
        (),
        "Keys for POST /models/load and /models/unload. Default: no such routes.",
        "HTTP",
        "KEY,...",
        parse=_parse_keys,
        is_secret=True,
    )
    admin_key_file: Path | None = setting(
        None, "File of more such keys, one a line, as --api-key-file has them.", "HTTP", "FILE"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins whose web pages may call the server, such as https://app.example.com; *: all.",
        "HTTP",
        "ORIGIN,...",
        rule=_origins_rule,
    )
    operator_routes: bool = setting(
        False,
        "Serve /tokenizer_info, /server_info and POST /reset_prefix_cache, for the operator of the server. They need "
        "an API key if there are any.",
        "HTTP",
    )
    ssl_certfile: Path | None = setting(
        None, "PEM file of the certificate and its chain: the server then speaks HTTPS.", "HTTP", "FILE"
    )
    ssl_keyfile: Path | None = setting(
        None, "PEM file of its private key, without a password; default: in --ssl-certfile.", "HTTP", "FILE"
    )
    max_loaded_models: int | None = setting(
        None,
        "Most models in memory at once. Another model is loaded when a request names it, and the least recently used "
        "model is unloaded. Default: all.",
        "Several models",
        "N",
        least=1,
    )
    model_memory: int | None = setting(
        None,
        "Memory of all models together, such as 8GiB; above it, models are unloaded as with --max-loaded-models. "
        "Default: no bound.",
        "Several models",
        "SIZE",
        above=0,
        parse=parse_size,
    )
    load_wait_s: float = setting(
        60.0,
        "Seconds that a request waits for its model to be loaded; then 503, and the client may retry.",
        "Several models",
        "SECONDS",
        least=0,
    )
    data_dir: Path | None = setting(
        None,
        "Folder of uploaded files and of batches (/v1/files, /v1/batches), for this server alone. Default: off.",
        "Batches",
        "FOLDER",
    )
    max_file_bytes: int = setting(
        200 * 1024 * 1024, "Largest file that may be uploaded.", "Batches", "SIZE", above=0, parse=parse_size
    )
    max_files: int = setting(
        10_000,
        "Files that one API key may have; also the number of its ended batches that are kept.",
        "Batches",
        "N",
        least=1,
    )
    batch_share: float = setting(
        0.02,
        "Share of the time that lines of batches get under a constant load of clients.",
        "Batches",
        "SHARE",
        above=0,
        most=1,
    )
    batch_memory: int = setting(
        64 * 1024 * 1024,
        "Bytes of the lines of all batches that run at once; a longer line runs alone.",
        "Batches",
        "SIZE",
        above=0,
        parse=parse_size,
    )
    batch_retention_s: int = setting(
        30 * 24 * 3600,
        "Seconds after its end until a batch is removed with its input, output and error files.",
        "Batches",
        "SECONDS",
        least=1,
    )
    answer_memory: int = setting(
        512 * 1024 * 1024,
        "Memory of all responses that are computed or sent. While it is full, requests for large responses are refused "
        "with 429. One client may hold half of it.",
        "Memory",
        "SIZE",
        above=0,
        parse=parse_size,
    )
    cache: int | None = setting(
        None,
        "Memory of a cache of embeddings, such as 1GiB. A text is then not computed again for a request with the same "
        "options and the same key.",
        "Memory",
        "SIZE",
        above=0,
        parse=parse_size,
    )
    cache_dir: Path | None = setting(
        None,
        "Folder on a local disk for a cache of embeddings that outlives the server. All servers of this machine that "
        "name the folder share it (extra `cache`).",
        "Memory",
        "FOLDER",
    )
    cache_dir_size: int = setting(
        10 * 1024**3,
        "Largest size of a new --cache-dir; an existing one keeps its size.",
        "Memory",
        "SIZE",
        above=0,
        parse=parse_size,
    )
    access_log: bool = setting(False, "Log a line for each request, with the time of its stages.", "Logging")
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
    name: str | None = setting(None, "The name that is shown; default: the model's own.", "Model", "NAME")
    aliases: tuple[str, ...] = setting((), "More names that requests may use.", "Model", "NAME,...")
    preload: bool | None = setting(
        None, "Load it at the start; default: yes, for as many as --max-loaded-models allows.", "Model"
    )
    pin: bool = setting(False, "Never unload it to make memory for another one.", "Model")
    ttl: float | None = setting(
        None, "Seconds without a request after which it is unloaded; default: it stays.", "Model", "SECONDS", least=0
    )
    default_prompt_name: str | None = setting(
        None, "As the setting of the server, for this model; default: that.", "Model", "NAME"
    )
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
