"""The table of served names: which model a request names, and what is known of each."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from starlette.types import Scope

from penstock.engine import AsyncEngine, ModelInfo
from penstock.engine.client.supervisor import EngineState
from penstock.engine.protocol.errors import EngineUnavailableError, ModelNotFoundError
from penstock.engine.protocol.model_info import ModelKind

from ..admission import ServerRefusalReason
from ..observability.timing import REQUEST
from ..wire.shown_values import shown, shown_names
from .keeper import ModelKeeper
from .model_entry import ModelEntry, ModelStatus

UNNAMED: Final = "default/not-specified"
"""What Infinity's client sends where its caller named no model."""
IS_PATIENT: Final = "penstock.is_patient"
"""In the scope of a request that can wait, so that no model goes for it which others may miss."""
_USED: Final = "penstock.models"
"""Where the scope of a request has the models whose engines it has."""


class Target(NamedTuple):
    """What a request goes to.

    Attributes:
        engine: The engine of the model.
        name: The model's name, as the answer shows it.
        default_prompt_name: The model's prompt for texts to embed of requests that say nothing about one.
    """

    engine: AsyncEngine
    name: str
    default_prompt_name: str | None


class Described(NamedTuple):
    """A served model and what is known of it, loaded or not.

    Attributes:
        entry: The model.
        name: One of its names.
        info: What was resolved; None for a model that has not been on this machine yet.
    """

    entry: ModelEntry
    name: str
    info: ModelInfo | None

    def known(self) -> ModelInfo:
        """Returns what was resolved. Raises EngineUnavailableError where nothing is known before it is loaded."""
        if self.info is None:
            raise EngineUnavailableError(
                f"What {self.name} is will be known once it is loaded; send it a request.",
                reason=ServerRefusalReason.MODEL_LOADING,
            )
        return self.info


class ModelTable:
    """Served names to models. Requests that name none go to the first that was made for them.

    Args:
        keeper: Loads the models.

    Attributes:
        is_starting: Models are being loaded that the server is not ready without: requests for them are told to come
            back, while those for a model that is loaded on demand wait for it.
        entries: The models, in their order.
    """

    def __init__(self, keeper: ModelKeeper) -> None:
        self.is_starting = True
        self.entries: Sequence[ModelEntry] = keeper.entries
        self._keeper = keeper
        self._named = {name: entry for entry in keeper.entries for name in entry.model.names}

    def find(self, name: str | None, scope: Scope, kinds: Collection[ModelKind] = ()) -> Target | None:
        """Returns what a request goes to by the model that it names, and notes it in the record of that request.

        Its engine stays until `release`.

        Args:
            name: The name; None or empty: none.
            scope: Of the request.
            kinds: What a request that names none is for; see `entry`.

        Returns:
            The target; None where the model has to be loaded first: `load` does that.

        Raises:
            EngineUnavailableError: The server has not started yet.
            ModelNotFoundError: No model has this name; the message lists those that are served.
        """
        entry = self.entry(name, kinds)
        if (record := REQUEST.get()) is not None:
            record.model = entry.name
        if entry.status is not ModelStatus.LOADED:
            self._check_started(entry)
            return None
        entry.enter()
        return self._given(entry, name, scope)

    async def load(self, name: str | None, scope: Scope, kinds: Collection[ModelKind] = ()) -> Target:
        """Returns what `find` returns once the model is loaded. Raises what `find` and ModelKeeper.acquire raise."""
        entry = self.entry(name, kinds)
        await self._keeper.acquire(entry, is_patient=IS_PATIENT in scope)
        return self._given(entry, name, scope)

    def release(self, scope: Scope) -> None:
        """Gives back what a request has been given; it needs no engine any more."""
        for entry in scope.pop(_USED, ()):
            entry.leave(time.monotonic())

    async def load_now(self, name: str) -> None:
        """Loads a model. Raises ModelNotFoundError, and EngineUnavailableError with what keeps it from being loaded."""
        if (error := await self._keeper.load(self.entry(name))) is not None:
            raise EngineUnavailableError(
                f"{name} could not be loaded: {error}", reason=ServerRefusalReason.MODEL_LOADING
            ) from error

    async def unload_now(self, name: str) -> None:
        """Unloads a model; see ModelKeeper.unload. Raises ModelNotFoundError."""
        await self._keeper.unload(self.entry(name))

    def keep(self, name: str | None, ttl_s: float) -> None:
        """Keeps a model for so long after its last request; see ModelKeeper.keep. Raises ModelNotFoundError."""
        self._keeper.keep(self.entry(name), ttl_s)

    def entry(self, name: str | None, kinds: Collection[ModelKind] = ()) -> ModelEntry:
        """Returns the model that a request names; without a name the first of some kinds, or the first of all.

        Raises ModelNotFoundError.
        """
        entry = self._named.get(name or "")
        if entry is not None:
            return entry
        if not name or name == UNNAMED:
            made_for_it = (each for each in self.entries if each.info is not None and each.info.kind in kinds)
            return next(made_for_it, self.entries[0])
        served = shown_names([entry.name for entry in self.entries])
        raise ModelNotFoundError(f"The model {shown(name)} does not exist; this server has {served}.", param="model")

    def describe(self, name: str | None) -> Described:
        """Returns what is known of a served model without loading it. Raises what `find` raises."""
        entry = self.entry(name)
        if entry.info is None or entry.status is not ModelStatus.LOADED:
            self._check_started(entry)
        return Described(entry, name if name and name in self._named else entry.name, entry.info)

    def describe_all(self) -> list[Described]:
        """Returns every model by its shown name. Raises EngineUnavailableError while all are being loaded."""
        if self.is_starting and not self.engines():
            raise _starting()
        return [Described(entry, entry.name, entry.info) for entry in self.entries]

    def engines(self) -> list[Target]:
        """Returns the engine of every model that is loaded, by its shown name."""
        return [
            Target(entry.engine, entry.name, entry.model.default_prompt_name)
            for entry in self.entries
            if entry.engine is not None
        ]

    def named_engines(self) -> list[tuple[AsyncEngine, str]]:
        """Returns what `engines` returns, without the prompts."""
        return [(target.engine, target.name) for target in self.engines()]

    @property
    def only(self) -> Target | None:
        """What every request goes to, by its shown name; None where a body must be read to know, or none is loaded."""
        first = self.entries[0]
        if len(self.entries) > 1 or first.engine is None or first.status is not ModelStatus.LOADED:
            return None
        return Target(first.engine, first.name, first.model.default_prompt_name)

    @property
    def is_ready(self) -> bool:
        """Whether the server has started and can answer requests for a model, loaded already or on demand."""
        return not self.is_starting and any(entry.is_good for entry in self.entries)

    @property
    def is_alive(self) -> bool:
        """Whether not every engine has been given up."""
        return not all(entry.state == EngineState.DEAD for entry in self.entries)

    def states(self) -> dict[str, str]:
        """Returns where each model is in its life, by its shown name."""
        states = {entry.name: entry.state for entry in self.entries}
        if self.is_starting:
            expected = [e.name for e in self.entries if e.status is ModelStatus.UNLOADED and e.model.is_preloaded]
            states |= dict.fromkeys(expected, EngineState.STARTING)
        return states

    def _given(self, entry: ModelEntry, name: str | None, scope: Scope) -> Target:
        """Returns the target of a request that has the engine of a model from now on."""
        assert entry.engine is not None
        scope.setdefault(_USED, []).append(entry)
        shown_name = name if name and name in self._named else entry.name
        return Target(entry.engine, shown_name, entry.model.default_prompt_name)

    def _check_started(self, entry: ModelEntry) -> None:
        if self.is_starting and entry.model.is_preloaded:
            raise _starting()


def _starting() -> EngineUnavailableError:
    return EngineUnavailableError(
        "The model is being loaded. Please try again in a moment.", reason=ServerRefusalReason.MODEL_LOADING
    )
