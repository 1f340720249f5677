"""The path of each model on a cluster: one model at the root, several each below a path of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.engine import EngineConfig

from ..settings import UsageError


class Mount(NamedTuple):
    """A model and its path.

    Attributes:
        config: Of its engines.
        names: Served names, the shown one first.
        default_prompt_name: As the setting of that name.
        app: Name of its Ray Serve application.
        prefix: Prefix of its paths.
    """

    config: EngineConfig
    names: tuple[str, ...]
    default_prompt_name: str | None
    app: str
    prefix: str


def mounts_of(models: Sequence[tuple[EngineConfig, tuple[str, ...], str | None]]) -> list[Mount]:
    """Returns the paths of models, each given as configuration, names and default prompt.

    A single model is at the root. Several are each below the last part of their shown name, so that clients choose by
    their base URL: `http://host:8000/bge-m3/v1`. To route by the `model` of a body, a process would have to read and
    hold the body before the one that answers.

    Raises:
        UsageError: Two models would have the same path.
    """
    places = [re.sub(r"[^\w.-]+", "-", names[0].rstrip("/").rpartition("/")[2]) for _, names, _ in models]
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice:
        raise UsageError(f"MODEL: two models would be served at /{twice[0]}; give one another `name` in --config FILE")
    return [
        Mount(*model, f"penstock-{place}", "/" if len(models) == 1 else f"/{place}")
        for model, place in zip(models, places, strict=True)
    ]


def everywhere(model: str) -> str:
    """Returns a local folder as an absolute path, because replicas run in other working directories."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
