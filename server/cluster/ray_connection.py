"""The connection to a Ray cluster, or a new cluster on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import ray

from ..settings import CommandError


@contextlib.contextmanager
def connected(address: str | None, log_level: str) -> Iterator[None]:
    """Context manager that is connected to a cluster.

    Args:
        address: Address of the cluster; `auto`: the cluster of this machine. None: as `auto`, or a new cluster that
            ends with this process if there is none.
        log_level: Level of Ray's own messages.

    Raises:
        CommandError: There is no cluster at the address.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # for a cluster started by this process
    folder = Path.cwd()
    try:
        # Ray adds the driver's working directory to the import path of its workers. In a checkout that would make
        # `kernels` importable, which transformers mistakes for another package.
        os.chdir("/")
        ray.init(address, logging_level=log_level.upper(), log_to_driver=log_level == "debug")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise CommandError(f"--address: {error}") from error
    finally:
        os.chdir(folder)
    logging.getLogger("ray").setLevel(log_level.upper())
    try:
        yield
    finally:
        ray.shutdown()
