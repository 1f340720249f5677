"""Settings of `penstock ray`: those of serve and embed, and what only a cluster has.

Flags and variables as in server/settings/, which alone reads the environment for them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from penstock.engine import EngineConfig

from ..settings import EmbedSettings, EngineSettings, ServerSettings, UsageError
from ..settings.types import Seconds

logger = logging.getLogger(__name__)


class ClusterSettings(EngineSettings):
    """What `penstock ray serve` and `penstock ray embed` share: the cluster, and the engines that run on it."""

    address: str | None = Field(
        None,
        description=(
            "Ray cluster, such as host:6379; auto: the one of this machine. Default: that, or where there is none a "
            "new one that ends with the command."
        ),
    )
    min_replicas: PositiveInt = Field(1, description="Engines that run always.")
    max_replicas: PositiveInt | None = Field(None, description="Most engines; default: --min-replicas.")
    replica_cpus: PositiveFloat = Field(
        1.0, description="Cores that Ray reserves for an engine; also its --num-threads, rounded up."
    )
    replica_gpus: NonNegativeFloat = Field(0.0, description="GPUs, or a share of one, that Ray reserves for an engine.")

    def on_replica(self, config: EngineConfig) -> EngineConfig:
        """Returns the configuration of an engine on the cluster.

        It takes no more cores than Ray reserves for it. On a CPU `--dtype auto` is float32: each engine would measure
        for itself what is faster, and vectors of one model, or of one output, could be of two types.
        """
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
        """Most engines at once."""
        return self.max_replicas or self.min_replicas


class RayServeSettings(ClusterSettings, ServerSettings):
    """Settings of `penstock ray serve`."""

    target_queue_s: PositiveFloat = Field(
        1.0, description="Seconds of work that may wait on each engine before there are more of them."
    )
    upscale_delay_s: Seconds = Field(10.0, description="Seconds for which more engines must be wanted.")
    downscale_delay_s: Seconds = Field(300.0, description="Seconds for which fewer engines must be enough.")
    max_ongoing_requests: PositiveInt = Field(512, description="Requests that an engine is sent at once.")
    max_queued_requests: PositiveInt = Field(
        1024, description="Requests that wait in each of Ray's proxies, from which on others are refused with 429."
    )
    proxy_location: Literal["EveryNode", "HeadOnly"] = Field(
        "EveryNode", description="Machines on which Ray listens: those that run an engine, or the head alone."
    )
    detach: bool = Field(False, description="Leave the models deployed when they serve, and return.")


class RayEmbedSettings(ClusterSettings, EmbedSettings):
    """Settings of `penstock ray embed`."""

    output: str = Field(description="Folder to write, one that every machine shares.")
    piece_rows: PositiveInt = Field(
        2048, description="Rows of one file of the output, which is done, or done again, as a whole."
    )


_NOT_HERE: Final = {
    "on_bad_row": "a row that cannot be embedded ends the run; leave such rows out of the input",
    "in_process": "an engine of a cluster has a process of its own, beside its replica",
    "max_loaded_models": "each model has replicas of its own, which --min-replicas and --max-replicas bound",
    "model_memory": "each model has replicas of its own, which --min-replicas and --max-replicas bound",
    "data_dir": "a folder of batches has one server, and here are many",
    "batch_share": "a folder of batches has one server, and here are many",
    "batch_memory": "a folder of batches has one server, and here are many",
    "batch_retention_s": "a folder of batches has one server, and here are many",
    "max_file_bytes": "a folder of batches has one server, and here are many",
    "max_files": "a folder of batches has one server, and here are many",
    "api_workers": "Ray's proxies take the connections, and each replica has one HTTP process",
    "cache": "each replica would have a cache of its own, which the others could not ask",
    "cache_dir": "each replica would have a cache of its own, which the others could not ask",
    "cache_dir_size": "each replica would have a cache of its own, which the others could not ask",
    "min_transfer_rate": "Ray's proxies read bodies and write answers",
    "transfer_grace_s": "Ray's proxies read bodies and write answers",
    "admin_key": "deploy models, and take them down, by the command",
    "admin_key_file": "deploy models, and take them down, by the command",
}
"""Flags that mean nothing on a cluster, and why."""


def check_flags(settings: RayServeSettings | RayEmbedSettings) -> None:
    """Raises UsageError for a flag that a cluster cannot heed."""
    for field, reason in _NOT_HERE.items():
        if (
            field in type(settings).model_fields
            and getattr(settings, field) != type(settings).model_fields[field].default
        ):
            raise UsageError(f"--{field.replace('_', '-')}: not on Ray: {reason}")
    if settings.most_replicas < settings.min_replicas:
        raise UsageError(f"--max-replicas: must be at least --min-replicas ({settings.min_replicas})")
    if isinstance(settings, RayServeSettings) and not settings.port:
        raise UsageError("--port: Ray's proxies listen on every machine and need a port that is free on all; not 0")
