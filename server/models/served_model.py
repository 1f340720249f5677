"""A model that the operator serves, with its settings, and the errors of a command that cannot load it.

It does not import ModelManager and AsyncEngine: commands that start no server import this module, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from penstock.engine import EngineConfig
from penstock.engine.model_files.model_folder import is_local
from penstock.engine.protocol.errors import MachineError, ModelLoadError

from ..settings import CommandError, UsageError

if TYPE_CHECKING:
    from penstock.engine import ModelInfo

    from .model_entry import ManagedEngine


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the operator has configured. Other processes get it without `start`.

    Attributes:
        names: Names that requests may use: the shown name first, then aliases.
        start: Loads the model and returns its engine. None until the server knows how.
        default_prompt_name: Prompt for texts to embed if a request names none.
        config: Configuration of its engine.
        info: Contents of its files if they are on this machine, so that it can be described before it is loaded.
        is_preloaded: Load it when the server starts, not with its first request.
        is_pinned: Never unload it for other models.
        ttl_s: Seconds without a request after which it is unloaded; infinity: never.
        num_bytes: Expected bytes of memory; 0 if unknown before it is loaded.
        hidden_names: Names that requests may use but clients are not shown: paths on the server's disk.
    """

    names: tuple[str, ...]
    start: Callable[[], Awaitable[ManagedEngine]] | None = None
    default_prompt_name: str | None = None
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
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
    def is_on_demand(self) -> bool:
        """Whether it is loaded only while it is used. Clients may then set how long it stays loaded."""
        return not self.is_pinned and (not self.is_preloaded or self.ttl_s < inf)


def check_prompt_name(name: str | None, info: ModelInfo) -> None:
    """Raises ModelLoadError if the model has no prompt `name`."""
    if name is not None and name not in info.prompts:
        has = ", ".join(info.prompts) or "none"
        raise ModelLoadError(f"--default-prompt-name: {info.name} has no prompt {name!r}; it has: {has}.")


def exit_code_of(error: Exception, model: str, revision: str | None, otherwise: int) -> int:
    """Returns the exit code of a command that cannot load its model: 2 if a local folder is missing or broken.

    Args:
        error: The error of the load.
        model: Local folder or hub id.
        revision: Revision of a hub id.
        otherwise: The code for a hub id, a machine that lacks something, or an unexpected error.
    """
    is_of_files = isinstance(error, ModelLoadError) and not isinstance(error, MachineError)
    return UsageError.exit_code if is_of_files and is_local(model, revision) else otherwise


def load_failure(error: ModelLoadError, model: str, revision: str | None) -> CommandError:
    """Returns the error of a command that cannot load its model, with the exit code of `exit_code_of`."""
    code = exit_code_of(error, model, revision, CommandError.exit_code)
    return (UsageError if code == UsageError.exit_code else CommandError)(error.message)
