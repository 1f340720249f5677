"""Settings of `penstock serve`: those of an engine, and of what stands around it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, PositiveInt, ValidationInfo
from pydantic_settings import NoDecode

from .engine_settings import EngineSettings
from .environment import environment_variable
from .types import Bytes, Origins, RateBytes, Seconds, ServedNames, Url, listed


def _keys(value: object, info: ValidationInfo) -> object:
    """Refuses keys that were given but are none: the server would be open to everyone by mistake."""
    keys = listed(value)
    # The default arrives here too, where env_ignore_empty has hidden an empty variable.
    if not keys and (value != () or environment_variable(str(info.field_name)) in os.environ):
        raise ValueError("holds no key; give a key, or leave it out to serve without keys")
    return keys


Keys = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_keys)]


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
    admin_key_file: Path | None = Field(
        None, description="File of more such keys, one a line, as --api-key-file has them."
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
    max_body_bytes: PositiveInt = Field(16 * 1024 * 1024, description="Largest request body.")
    max_json_values: PositiveInt = Field(
        2_000_000,
        description=(
            "Numbers and words, such as token ids, in one request body; a text, list, object or key counts as 8."
        ),
    )
    answer_memory: Bytes = Field(
        ByteSize(512 * 1024 * 1024),
        description=(
            "Memory of all answers under way; while it is full, requests for large ones are refused with 429. One "
            "client may hold half of it."
        ),
    )
    min_transfer_rate: RateBytes = Field(
        ByteSize(16 * 1024),
        description=(
            "Bytes a second, such as 16KiB, below which clients may not send a body or read an answer: then the body "
            "is refused with 408, and the connection of the answer is reset. 0: any rate."
        ),
    )
    transfer_grace_s: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a client may take longer than at --min-transfer-rate, such as for a pause.",
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
        0.02, gt=0, le=1, description="Share of the time that lines of batches get under a constant load of clients."
    )
    batch_memory: Bytes = Field(
        ByteSize(64 * 1024 * 1024),
        description="Bytes of the lines of all batches that run at once; a longer line runs alone.",
    )
    batch_retention_s: PositiveInt = Field(
        30 * 24 * 3600,
        description="Seconds after its end when a batch is removed with its input file, answers and errors.",
    )
    max_file_bytes: Bytes = Field(ByteSize(200 * 1024 * 1024), description="Largest file that may be uploaded.")
    max_files: PositiveInt = Field(
        10_000, description="Files that one API key may have; also the number of its ended batches that are kept."
    )
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
