"""Environment variables of Text Embeddings Inference (TEI) and Infinity, converted to settings (`--env-compat`).

Names and values are those of TEI 1.9 (router/src/main.rs) and Infinity 0.0.78 (its module env). Only variables that are
set are converted: defaults stay those of penstock. They are read on request only, because Docker and Kubernetes set
HOSTNAME, and Kubernetes sets INFINITY_PORT beside a Service named infinity.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .load import (
    UsageError,
    declared_settings,
    did_you_mean,
    environment_variable,
    flag_of,
    invalid_value,
    is_set,
    shown_value,
)

COMPAT_SERVERS: Final = ("tei", "infinity")
_PREFIX: Final = "INFINITY_"
_MODELS: Final = "INFINITY_MODEL_ID"
_SECRETS: Final = ("API_KEY", "HF_API_TOKEN", "HF_TOKEN", "INFINITY_API_KEY")
_FALSE: Final = ("0", "f", "false", "n", "no", "off")

Outcome = Mapping[str, Any] | str
"""Values of settings, or the end of a log line for a variable that sets none."""
Rule = Callable[[str], Outcome]
"""Converts the value of a variable. Raises ValueError for a value that penstock cannot follow."""


@dataclass(slots=True)
class CompatVariables:
    """The variables of another server that are set.

    Attributes:
        settings: Setting to variable and value.
        model_tables: With several models, one for each: keys and values of a [[models]] table.
        notes: One log line for each variable.
    """

    settings: dict[str, tuple[str, Any]] = field(default_factory=dict)
    model_tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_compat_variables(server: str, kind: type, given: Collection[str]) -> CompatVariables:
    """Reads the variables of another server.

    Args:
        server: One of COMPAT_SERVERS.
        kind: Dataclass of the settings.
        given: Names of settings on the command line. These and the variables of penstock have precedence.

    Raises:
        UsageError: penstock cannot follow a variable.
    """
    declared = declared_settings(kind)
    fixed = {name for name in declared if name in given or is_set(environment_variable(name), declared[name])}
    rules = _TEI if server == "tei" else _INFINITY | _INFINITY_MODELS
    num_models = max(len(_parts(_MODELS, os.environ.get(_MODELS, ""))), 1) if server == "infinity" else 1
    found = CompatVariables(model_tables=[{} for _ in range(num_models if num_models > 1 else 0)])
    for variable, rule in rules.items():
        if text := os.environ.get(variable):
            parts = _parts(variable, text)
            if len(parts) not in (1, num_models):
                raise UsageError(
                    f"{variable}: must have one value, or one for each model ({num_models}), separated by ; "
                    f"(got {shown_value(text)})"
                )
            _add(found, variable, text, [_converted(variable, part, rule) for part in parts], fixed)
    if server == "infinity":
        known = [variable.removeprefix(_PREFIX) for variable in rules]
        for variable in sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in rules):
            hint = did_you_mean(variable.removeprefix(_PREFIX), known)
            found.notes.append(f"{variable} has no effect: Infinity has no such variable{hint}")
    return found


def flag_of_other_server(flag: str) -> str:
    """Returns "; use the variable ..." for a flag of TEI or Infinity, or "" for any other flag."""
    name = flag.removeprefix("--").replace("-", "_").upper()
    variables = {"tei": name} if name in _TEI else {}
    if _PREFIX + name in _INFINITY | _INFINITY_MODELS:
        variables["infinity"] = _PREFIX + name
    uses = [f"{variable} with --env-compat {server}" for server, variable in variables.items()]
    return f"; use the variable {', or '.join(uses)}" if uses else ""


def _parts(variable: str, text: str) -> list[str]:
    """Returns the values of a variable: one, or those of a list for Infinity's models."""
    return text.removesuffix(";").split(";") if variable in _INFINITY_MODELS else [text]


def _converted(variable: str, value: str, rule: Rule) -> Outcome:
    try:
        return rule(value) if value else "has no effect: it is empty"
    except ValueError as error:
        raise invalid_value(variable, error, value, is_secret=variable in _SECRETS) from error


def _add(found: CompatVariables, variable: str, text: str, outcomes: Sequence[Outcome], fixed: Collection[str]) -> None:
    """Adds the outcomes of a variable: one, or one for each model."""
    shown = variable if variable in _SECRETS else f"{variable}={text if text.isprintable() else shown_value(text)}"
    names = list(dict.fromkeys(name for outcome in outcomes if not isinstance(outcome, str) for name in outcome))
    if not names:
        found.notes.append(f"{shown} {outcomes[0]}")
        return
    (name,) = names
    if name in fixed:
        found.notes.append(f"{shown} has no effect: {flag_of(name)} or {environment_variable(name)} has precedence")
        return
    if name in found.settings:
        raise UsageError(f"{variable}: {found.settings[name][0]} also sets {flag_of(name)}; unset one of them")
    found.notes.append(f"{shown} sets {'MODEL' if name == 'model' else flag_of(name)}")
    if not found.model_tables or variable not in _INFINITY_MODELS:
        found.settings[name] = (variable, next(o[name] for o in outcomes if not isinstance(o, str)))
        return
    for table, outcome in zip(found.model_tables, itertools.cycle(outcomes), strict=False):
        if isinstance(outcome, str):
            continue
        if name == "served_model_name":
            table["name"] = outcome[name][0]
        else:
            table[name] = outcome[name]


def _sets(name: str) -> Rule:
    return lambda value: {name: value}


def _ignored(reason: str) -> Rule:
    return lambda _: f"has no effect: {reason}"


def _one_of(outcomes: Mapping[str, Outcome]) -> Rule:
    """A rule for a variable with known values."""

    def rule(value: str) -> Outcome:
        if value not in outcomes:
            raise ValueError(f"must be one of {', '.join(outcomes)}")
        return outcomes[value]

    return rule


def _truth(name: str, value: Any = True, *, otherwise: Any = None) -> Rule:
    """A rule that sets a value for true and `otherwise` for false; None has no effect."""

    def rule(text: str) -> Outcome:
        chosen = otherwise if text.strip().lower() in _FALSE else value
        return "has no effect: it is off" if chosen is None else {name: chosen}

    return rule


def _api_key(value: str) -> Outcome:
    if "," in value:
        raise ValueError("has a comma, which would separate two keys; use --api-key-file")
    return {"api_key": (value,)}


def _auto_truncate(value: str) -> Outcome:
    if value.strip().lower() in _FALSE:
        return "has no effect: TEI's routes truncate long inputs unless the request has truncate: false"
    return {"auto_truncate": True}


def _hostname(value: str) -> Outcome:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return "has no effect: it is no IP address; the server listens on --host, as TEI on 0.0.0.0"
    return {"host": value}


def _unsupported(reason: str) -> Rule:
    def rule(_: str) -> Outcome:
        raise ValueError(f"is not supported: {reason}")

    return rule


def _url_prefix(value: str) -> Outcome:
    prefix = value.rstrip("/")
    if prefix in ("", "/v1"):
        return "has no effect: the routes exist with and without /v1"
    return {"root_path": prefix}


def _preload_only(value: str) -> Outcome:
    if value.strip().lower() in _FALSE:
        return "has no effect: it is off"
    raise ValueError("is not supported: penstock serve does not end after loading; unset it")


def _device_ids(value: str) -> Outcome:
    ids = [part.strip() for part in value.split(",") if part.strip()]
    if not ids or not all(part.isdecimal() for part in ids):
        raise ValueError("must be numbers of CUDA devices, such as 0,1")
    return {"devices": tuple(f"cuda:{part}" for part in ids)}


def _device(value: str) -> Outcome:
    if value in ("cuda", "auto") and os.environ.get("INFINITY_DEVICE_ID", "").strip(";"):
        return "has no effect: INFINITY_DEVICE_ID selects the devices"
    return _one_of({name: {"device": name} for name in ("cpu", "cuda", "auto")})(value)


_POOLING: Final[dict[str, Outcome]] = {
    "cls": {"pooler_config": {"pooling_type": "CLS"}},
    "mean": {"pooler_config": {"pooling_type": "MEAN"}},
}
_BY_WORK: Final = "the queue is limited by its work; see --max-queued-tokens and --max-queue-s"
_TEI: Final[dict[str, Rule]] = {
    "MODEL_ID": _sets("model"),
    "REVISION": _sets("revision"),
    "TOKENIZATION_WORKERS": _sets("tokenizer_workers"),
    "DTYPE": _one_of({name: {"dtype": name} for name in ("float16", "float32", "bfloat16")}),
    "SERVED_MODEL_NAME": lambda value: {"served_model_name": (value,)},
    "POOLING": _one_of(
        {
            **_POOLING,
            "last-token": {"pooler_config": {"pooling_type": "LAST"}},
            "splade": "has no effect: SPLADE models are recognised by their files",
        }
    ),
    "MAX_CONCURRENT_REQUESTS": _ignored(_BY_WORK),
    "MAX_BATCH_TOKENS": _sets("max_num_batched_tokens"),
    "MAX_BATCH_REQUESTS": _sets("max_num_seqs"),
    "MAX_CLIENT_BATCH_SIZE": _sets("max_inputs_per_request"),
    "AUTO_TRUNCATE": _auto_truncate,
    "DEFAULT_PROMPT_NAME": _sets("default_prompt_name"),
    "DEFAULT_PROMPT": _sets("default_prompt"),
    "DENSE_PATH": _unsupported("the model's modules.json names the Dense modules that run; unset it"),
    "HF_API_TOKEN": _ignored("set HF_TOKEN"),
    "HF_TOKEN": lambda _: "is read by the library of the hub",
    "HUGGINGFACE_HUB_CACHE": lambda _: "is read by the library of the hub",
    "HOSTNAME": _hostname,
    "PORT": _sets("port"),
    "UDS_PATH": _ignored("penstock chooses the sockets between its processes"),
    "PAYLOAD_LIMIT": _sets("max_body_bytes"),
    "API_KEY": _api_key,
    "JSON_OUTPUT": _truth("log_format", "json"),
    "DISABLE_SPANS": _ignored("log lines contain no spans"),
    "OTLP_ENDPOINT": _ignored("penstock sends traces over HTTP; set --otlp-traces-endpoint, often port 4318"),
    "OTLP_SERVICE_NAME": _ignored("set OTEL_SERVICE_NAME"),
    "PROMETHEUS_PORT": _sets("metrics_port"),
    "CORS_ALLOW_ORIGIN": _sets("cors_origins"),
}
_INFINITY: Final[dict[str, Rule]] = {
    "INFINITY_API_KEY": _api_key,
    "INFINITY_HOST": _sets("host"),
    "INFINITY_PORT": _sets("port"),
    "INFINITY_LOG_LEVEL": lambda value: {"log_level": {"critical": "error", "trace": "debug"}.get(value, value)},
    "INFINITY_MAX_CLIENT_BATCH_SIZE": _sets("max_inputs_per_request"),
    "INFINITY_PERMISSIVE_CORS": _truth("cors_origins", "*"),
    "INFINITY_URL_PREFIX": _url_prefix,
    "INFINITY_PROXY_ROOT_PATH": _sets("root_path"),
    "INFINITY_PRELOAD_ONLY": _preload_only,
    "INFINITY_QUEUE_SIZE": _ignored(_BY_WORK),
    "INFINITY_REDIRECT_SLASH": _ignored("/ is the playground"),
    "INFINITY_ANONYMOUS_USAGE_STATS": _ignored("penstock sends no telemetry"),
    "INFINITY_CALIBRATION_DATASET_URL": _ignored("quantisation needs no calibration"),
    "INFINITY_HOME": _ignored("set HF_HOME for models, --cache-dir for vectors"),
    "INFINITY_DISABLE_OPTIMUM": _ignored("penstock does not use optimum"),
    "INFINITY_MEDIA_URL_BLACKLIST": _ignored(
        "the server downloads no image unless --allowed-media-domains has its host"
    ),
    "INFINITY_MEDIA_MAX_DOWNLOAD_BYTES": _ignored("set --max-image-bytes"),
}
_INFINITY_MODELS: Final[dict[str, Rule]] = {
    _MODELS: _sets("model"),
    "INFINITY_SERVED_MODEL_NAME": lambda value: {"served_model_name": (value,)},
    "INFINITY_REVISION": _sets("revision"),
    "INFINITY_BATCH_SIZE": _sets("max_num_seqs"),
    "INFINITY_TRUST_REMOTE_CODE": _truth("trust_remote_code", otherwise=False),
    "INFINITY_DTYPE": _one_of({name: {"dtype": name} for name in ("auto", "float32", "float16", "bfloat16", "int8")}),
    "INFINITY_DEVICE": _device,
    "INFINITY_DEVICE_ID": _device_ids,
    "INFINITY_POOLING_METHOD": _one_of({**_POOLING, "auto": "has no effect: the model's files choose the pooling"}),
    "INFINITY_EMBEDDING_DTYPE": _one_of(
        {"float32": "has no effect: vectors are float32 unless a request sets output_dtype or encoding_format"}
    ),
    "INFINITY_ENGINE": _one_of(
        dict.fromkeys(("torch", "optimum", "ctranslate2"), "has no effect: the model and the device choose the engine")
    ),
    "INFINITY_VECTOR_DISK_CACHE": _ignored("name a folder with --cache-dir"),
    "INFINITY_MODEL_WARMUP": _ignored("every model is warmed up"),
    "INFINITY_LENGTHS_VIA_TOKENIZE": _ignored("lengths are always counted in tokens"),
    "INFINITY_COMPILE": _ignored("penstock has its own kernels"),
    "INFINITY_BETTERTRANSFORMER": _ignored("penstock has its own kernels"),
    "INFINITY_ONNX_DISABLE_OPTIMIZE": _ignored("penstock does not use ONNX"),
    "INFINITY_ONNX_DO_NOT_PREFER_QUANTIZED": _ignored("penstock does not use ONNX"),
}
"""Variables with one value for all models, or one for each."""
