"""Settings of `penstock ray serve` and `penstock ray embed`: those of serve and embed, and those of a cluster."""

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
    """Settings of both commands: the cluster, and the engines on it."""

    address: str | None = setting(
        None,
        "Ray cluster, such as host:6379; auto: the cluster of this machine. Default: as auto, or a new cluster that "
        "ends with the command if there is none.",
        "Cluster",
        "ADDRESS",
    )
    min_replicas: int = setting(1, "Smallest number of engines.", "Cluster", "N", least=1)
    max_replicas: int | None = setting(
        None, "Largest number of engines; default: --min-replicas.", "Cluster", "N", least=1
    )
    replica_cpus: float = setting(
        1.0, "Cores that Ray reserves for an engine; also its --num-threads, rounded up.", "Cluster", "N", above=0
    )
    replica_gpus: float = setting(
        0.0, "GPUs, or a share of one, that Ray reserves for an engine.", "Cluster", "N", least=0
    )

    def on_replica(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration of an engine on the cluster.

        A local folder is an absolute path, because replicas run in other working directories.
        It takes no more cores than Ray reserves for it. On a CPU `--dtype auto` is float32: each engine would choose
        its own dtype by measurement, and one output could hold vectors of two dtypes.
        """
        if Path(config.model).is_dir():
            config = dataclasses.replace(config, model=str(Path(config.model).resolve()))
        if not config.num_threads:
            config = dataclasses.replace(config, num_threads=math.ceil(self.replica_cpus))
        places = config.devices or (config.device,)
        is_on_gpu = any(place.startswith("cuda") for place in places) or (places == ("auto",) and self.replica_gpus > 0)
        if config.dtype == "auto" and not is_on_gpu:
            logger.info("%s: --dtype auto is float32 on the CPUs of a cluster", config.name or config.model)
            config = dataclasses.replace(config, dtype="float32")
        return config

    @property
    def most_replicas(self) -> int:
        """Largest number of engines at once."""
        return self.max_replicas or self.min_replicas


@dataclass(frozen=True, kw_only=True)
class RayServeSettings(ClusterSettings, ServerSettings):
    """Settings of `penstock ray serve`."""

    target_queue_s: float = setting(
        1.0, "Seconds of work that may wait on each engine before engines are added.", "Cluster", "SECONDS", above=0
    )
    upscale_delay_s: float = setting(
        10.0, "Seconds that more engines must be needed before they are added.", "Cluster", "SECONDS", least=0
    )
    downscale_delay_s: float = setting(
        300.0, "Seconds that fewer engines must be enough before engines are removed.", "Cluster", "SECONDS", least=0
    )
    max_ongoing_requests: int = setting(
        512, "Most requests that are sent to an engine at once.", "Cluster", "N", least=1
    )
    max_queued_requests: int = setting(
        1024,
        "Requests that wait in each of Ray's proxies; further requests are refused with 429.",
        "Cluster",
        "N",
        least=1,
    )
    proxy_location: str = setting(
        "EveryNode",
        "Machines on which Ray listens: all that run an engine, or only the head.",
        "Cluster",
        choices=("EveryNode", "HeadOnly"),
    )
    detach: bool = setting(False, "Return when the models serve, and leave them deployed.", "Cluster")


@dataclass(frozen=True, kw_only=True)
class RayEmbedSettings(ClusterSettings, EmbedSettings):
    """Settings of `penstock ray embed`."""

    output: str = setting(REQUIRED, "Folder to write, shared by all machines.", "Input and output", "FOLDER")
    piece_rows: int = setting(
        2048,
        "Rows of a shard. A shard is one file of the output, and is done, or done again, as a whole.",
        "Cluster",
        "ROWS",
        least=1,
    )


_NOT_HERE: Final = {
    "on_bad_row": "a row that cannot be embedded ends the run; leave such rows out of the input",
    "in_process": "an engine of a cluster has a process of its own, beside its replica",
    "max_loaded_models": "each model has replicas of its own, which --min-replicas and --max-replicas bound",
    "model_memory": "each model has replicas of its own, which --min-replicas and --max-replicas bound",
    "data_dir": "a folder of batches has one server, and a cluster has many",
    "batch_share": "a folder of batches has one server, and a cluster has many",
    "batch_memory": "a folder of batches has one server, and a cluster has many",
    "batch_retention_s": "a folder of batches has one server, and a cluster has many",
    "max_file_bytes": "a folder of batches has one server, and a cluster has many",
    "max_files": "a folder of batches has one server, and a cluster has many",
    "api_workers": "Ray's proxies take the connections, and each replica has one HTTP process",
    "cache": "each replica would have a cache of its own, which the others could not read",
    "cache_dir": "each replica would have a cache of its own, which the others could not read",
    "cache_dir_size": "each replica would have a cache of its own, which the others could not read",
    "min_transfer_rate": "Ray's proxies read bodies and write answers",
    "transfer_grace_s": "Ray's proxies read bodies and write answers",
    "admin_key": "deploy models, and take them down, by the command",
    "admin_key_file": "deploy models, and take them down, by the command",
}
"""Flags that have no effect on a cluster, each with the reason."""


def check_flags(settings: RayServeSettings | RayEmbedSettings) -> None:
    """Raises UsageError for a flag that has no effect on a cluster, and for numbers that do not fit."""
    values, declared = public_values(settings), declared_settings(type(settings))
    for name, reason in _NOT_HERE.items():
        if name in declared and values.get(name, settings.__dict__.get(name)) != declared[name].default:
            raise UsageError(f"{flag_of(name)}: not on Ray: {reason}")
    if settings.most_replicas < settings.min_replicas:
        raise UsageError(f"--max-replicas: must be at least --min-replicas ({settings.min_replicas})")
    if isinstance(settings, RayServeSettings) and not settings.port:
        raise UsageError("--port: Ray's proxies listen on every machine and need a port that is free on all; not 0")
