"""The log lines of a ready server: models, devices, addresses, and a warning about open access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.engine import EngineConfig, ModelInfo
from penstock.engine.protocol.setting import short_count

from ..models.model_entry import ModelEntry
from ..models.weight_files import WeightSummary
from ..settings import ServerSettings

_ALL_ADDRESSES: Final = ("0.0.0.0", "::", "")


def announcement(models: Sequence[ModelEntry], settings: ServerSettings, ports: Sequence[int]) -> str:
    """Returns the log lines of a ready server.

    Args:
        models: All served models, loaded or not.
        settings: Settings of the server.
        ports: Ports of the listening sockets, which the system chose if the settings say 0.
    """
    lines = ["ready"]
    for entry in models:
        lines += _lines(entry, entry.model.config)
    scheme = "http" if settings.ssl_certfile is None else "https"
    url = f"{scheme}://{_shown_host(settings.host)}:{ports[0]}"
    lines.append(f"  {url}/ is a playground, {url}/docs shows the routes, {url}/v1 is the base URL of OpenAI clients")
    if len(ports) > 1:
        metrics_host = settings.host if settings.metrics_host is None else settings.metrics_host
        lines.append(f"  metrics: http://{_shown_host(metrics_host)}:{ports[1]}/metrics")
    lines.append(f"  data routes need {'an' if _wants_key(settings) else 'no'} API key")
    return "\n".join(lines)


def _shown_host(host: str) -> str:
    """Returns the host of a URL that reaches an address to listen on."""
    if host in _ALL_ADDRESSES:
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _lines(entry: ModelEntry, config: EngineConfig) -> list[str]:
    if entry.engine is None:
        why = "could not be loaded; see above" if entry.error is not None else "is loaded when a request names it"
        return [f"  {entry.name}: {why}"]
    info, placements = entry.engine.info, [replica.placement for replica in entry.engine.replicas]
    return [
        f"  {entry.name}: {_sizes(info)}",
        f"    on {_device(info, config)}, in {_dtype(info, config)}; tasks: {', '.join(info.tasks)}",
        *([f"    {_replicas(placements)}"] if placements else []),
    ]


def open_access_warning(settings: ServerSettings) -> str | None:
    """Returns a warning if the server needs no API key and listens on other addresses than localhost, else None."""
    if _wants_key(settings) or settings.host not in _ALL_ADDRESSES:
        return None
    return "every client that reaches this machine may use the server: set --api-key KEY or --host 127.0.0.1"


def _wants_key(settings: ServerSettings) -> bool:
    return bool(settings.api_key) or settings.api_key_file is not None


def _device(info: ModelInfo, config: EngineConfig) -> str:
    if config.devices:
        why = "--devices"
    elif config.device != "auto":
        why = "--device"
    else:
        why = "auto: there is no CUDA device" if info.device == "cpu" else "auto: there is a CUDA device"
    lanes = f", {info.num_lanes} lane{'s' * (info.num_lanes > 1)}" if info.num_lanes else ""
    kernels, _, instructions = info.kernels.partition(", ")
    executor = f"the C library ({instructions})" if kernels == "native" else info.kernels
    return f"{info.device} ({why}) by {executor}{lanes}"


def _replicas(placements: Sequence[str]) -> str:
    count = "1 replica" if len(placements) == 1 else f"{len(placements)} replicas"
    return f"{count}: {'; '.join(placements)}"


def _dtype(info: ModelInfo, config: EngineConfig) -> str:
    """Returns the type of the weights and why, and the type of products or attention if it differs."""
    source = info.sources["dtype"]
    if config.dtype != "auto":
        why = "--dtype"
    elif source.startswith("measured"):
        why = source
    else:
        why = f"auto: {info.dtype} on {'a CPU' if info.device == 'cpu' else 'a GPU'}"
    if info.arithmetic is None or (why == source and info.arithmetic == info.dtype):  # arithmetic repeats the dtype
        return f"{info.dtype} ({why})"
    part = "attention" if info.dtype == "int8" else "products"
    return f"{info.dtype} ({why}), {part} in {info.arithmetic} ({info.sources['arithmetic']})"


def _sizes(info: ModelInfo) -> str:
    count = WeightSummary.of(info.path).num_parameters
    parts = [info.model_type, f"{short_count(count)} parameters"] if count else [info.model_type]
    if info.embedding_size:
        parts.append(f"{info.dimensions or info.embedding_size} dimensions")
    if info.labels:
        parts.append("1 class" if len(info.labels) == 1 else f"{len(info.labels)} classes")
    return ", ".join([*parts, f"inputs of up to {info.max_model_len} tokens"])
