"""A model that the operator wants served: under which names, how it is started, and when it may come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from penstock.engine import AsyncEngine, EngineConfig, ModelInfo
from penstock.engine.protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is to be served.

    Attributes:
        names: Names that requests may use; the first one is shown, the others are its aliases.
        start: Loads the model and returns its engine.
        default_prompt_name: Its prompt for texts to embed of requests that say nothing about one.
        config: Of its engine; None: the server's settings.
        info: What its files say, where they lie on this machine: it can be described before it is loaded.
        is_preloaded: It is loaded when the server starts; otherwise when a request first names it.
        is_pinned: Once loaded it stays, whatever else wants room.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        num_bytes: Bytes of memory that it is expected to take; 0 where that is not known before it is loaded.
        hidden_names: Names that requests may use and no client is shown: paths on the server's disk.
    """

    names: tuple[str, ...]
    start: Callable[[], Awaitable[AsyncEngine]]
    default_prompt_name: str | None = None
    config: EngineConfig | None = None
    info: ModelInfo | None = None
    is_preloaded: bool = True
    is_pinned: bool = False
    ttl_s: float = inf
    num_bytes: int = 0
    hidden_names: frozenset[str] = frozenset()

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The names that clients are shown."""
        return tuple(name for name in self.names if name not in self.hidden_names)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the operator wants it in memory only while it is used: then clients may say for how long."""
        return not self.is_pinned and (not self.is_preloaded or self.ttl_s < inf)


def check_prompt_name(name: str | None, info: ModelInfo) -> None:
    """Raises ModelLoadError if the model has no prompt `name`."""
    if name is not None and name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise ModelLoadError(f"--default-prompt-name: {info.name} has no prompt {name!r}; it has: {has}.")
