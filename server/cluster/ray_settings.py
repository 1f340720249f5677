"""Settings of `penstock ray serve` and `penstock ray embed`: the settings of serve and embed, and of the cluster."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.engine import EngineConfig
from penstock.engine.protocol.setting import REQUIRED, setting

from ..settings import (
    CommandSettings,
    EmbedSettings,
    ServerSettings,
    UsageError,
    declared_settings,
    flag_of,
    public_values,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(CommandSettings):
    """Settings of both commands: the cluster and its engines."""

    address: str | None = setting(
        None,
        "Address of the Ray cluster, such as host:6379; auto: the cluster of this machine. Default: as auto, or a new "
        "cluster for the time of the command.",
        "Cluster",
        "ADDRESS",
    )
    min_replicas: int = setting(1, "Minimum number of engines.", "Cluster", "N", min_value=1)
    max_replicas: int | None = setting(
        None, "Maximum number of engines; default: --min-replicas.", "Cluster", "N", min_value=1
    )
    replica_cpus: float = setting(
        1.0,
        "Cores that Ray reserves for an engine; also its --num-threads, rounded up.",
        "Cluster",
        "N",
        exclusive_min=0,
    )
    replica_gpus: float = setting(
        0.0, "GPUs, or a share of one, that Ray reserves for an engine.", "Cluster", "N", min_value=0
    )

    def on_replica(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration of an engine on the cluster.

        A local folder is an absolute path, because replicas run in other working directories.
        The engine uses only the cores that Ray reserves for it. On a CPU, `--dtype auto` is float32: otherwise each
        engine would choose its dtype by measurement, and one output could have vectors of two dtypes.
        """
        if Path(config.model).is_dir():
            config = dataclasses.replace(config, model=str(Path(config.model).resolve()))
        if not config.num_threads:
            config = dataclasses.replace(config, num_threads=math.ceil(self.replica_cpus))
        devices = config.devices or (config.device,)
        is_on_gpu = any(device.startswith("cuda") for device in devices) or (
            devices == ("auto",) and self.replica_gpus > 0
        )
        if config.dtype == "auto" and not is_on_gpu:
            logger.info("%s: --dtype auto is float32 on the CPUs of a cluster", config.name or config.model)
            config = dataclasses.replace(config, dtype="float32")
        return config

    @property
    def replica_limit(self) -> int:
        """Maximum number of engines."""
        return self.max_replicas or self.min_replicas


@dataclass(frozen=True, kw_only=True)
class RayServeSettings(ClusterSettings, ServerSettings):
    """Settings of `penstock ray serve`."""

    target_queue_s: float = setting(
        1.0, "Seconds of queued work per engine above which engines are added.", "Cluster", "SECONDS", exclusive_min=0
    )
    upscale_delay_s: float = setting(
        10.0,
        "Seconds for which more engines must be needed before engines are added.",
        "Cluster",
        "SECONDS",
        min_value=0,
    )
    downscale_delay_s: float = setting(
        300.0,
        "Seconds for which fewer engines must be enough before engines are removed.",
        "Cluster",
        "SECONDS",
        min_value=0,
    )
    max_ongoing_requests: int = setting(
        512, "Maximum number of concurrent requests per engine.", "Cluster", "N", min_value=1
    )
    max_queued_requests: int = setting(
        1024,
        "Maximum number of waiting requests in each Ray proxy; further requests are rejected with 429.",
        "Cluster",
        "N",
        min_value=1,
    )
    proxy_location: str = setting(
        "EveryNode",
        "Machines on which Ray listens: every machine with an engine, or only the head node.",
        "Cluster",
        choices=("EveryNode", "HeadOnly"),
    )
    detach: bool = setting(False, "Exit when the models are ready, and leave the models deployed.", "Cluster")


@dataclass(frozen=True, kw_only=True)
class RayEmbedSettings(ClusterSettings, EmbedSettings):
    """Settings of `penstock ray embed`."""

    output: str = setting(REQUIRED, "Output folder, shared by all machines.", "Input and output", "FOLDER")
    shard_rows: int = setting(
        2048,
        "Number of rows per shard. A shard is one output file and the unit of work after an interruption.",
        "Cluster",
        "ROWS",
        min_value=1,
    )


UNSUPPORTED: Final = {
    "on_bad_row": "a row that cannot be embedded ends the run; leave such rows out of the input",
    "in_process": "an engine on a cluster always has its own process",
    "max_loaded_models": "--min-replicas and --max-replicas bound the replicas of each model",
    "model_memory": "--min-replicas and --max-replicas bound the replicas of each model",
    "data_dir": "a batch folder belongs to one server, but a cluster has several",
    "batch_share": "a batch folder belongs to one server, but a cluster has several",
    "batch_memory": "a batch folder belongs to one server, but a cluster has several",
    "batch_retention_s": "a batch folder belongs to one server, but a cluster has several",
    "max_file_bytes": "a batch folder belongs to one server, but a cluster has several",
    "max_files": "a batch folder belongs to one server, but a cluster has several",
    "api_workers": "Ray's proxies accept the connections, and each replica has one HTTP process",
    "metrics_port": "Ray's proxies accept the connections; each replica has its own /metrics",
    "metrics_host": "Ray's proxies accept the connections; each replica has its own /metrics",
    "cache": "each replica would have its own cache, which other replicas cannot read",
    "cache_dir": "each replica would have its own cache, which other replicas cannot read",
    "cache_dir_size": "each replica would have its own cache, which other replicas cannot read",
    "min_transfer_rate": "Ray's proxies read bodies and write responses",
    "transfer_grace_s": "Ray's proxies read bodies and write responses",
    "admin_key": "deploy and delete models with the command",
    "admin_key_file": "deploy and delete models with the command",
}
"""Flags that have no effect on a cluster, each with the reason."""


def check_flags(settings: RayServeSettings | RayEmbedSettings) -> None:
    """Raises UsageError for a flag without effect on a cluster, and for inconsistent numbers."""
    values, declared = public_values(settings), declared_settings(type(settings))
    for name, reason in UNSUPPORTED.items():
        if name in declared and values.get(name, settings.__dict__.get(name)) != declared[name].default:
            raise UsageError(f"{flag_of(name)}: not on Ray: {reason}")
    if settings.replica_limit < settings.min_replicas:
        raise UsageError(f"--max-replicas: must be at least --min-replicas ({settings.min_replicas})")
    if isinstance(settings, RayServeSettings) and not settings.port:
        raise UsageError("--port: must not be 0, because Ray's proxies need the same port on every machine")
