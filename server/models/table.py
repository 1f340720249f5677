"""Maps served names to models and their engines, and describes the models."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, cast

from starlette.types import Scope

from penstock.engine import AsyncEngine, ModelInfo
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.errors import EngineUnavailableError, InvalidRequestError, ModelNotFoundError
from penstock.engine.protocol.model_info import ModelKind

from ..admission import ServerRejectionReason
from ..errors import quote, quote_names
from ..request_state import RequestState, state_of
from .model_entry import ModelEntry, ModelStatus
from .model_manager import ModelManager

UNSPECIFIED_MODEL: Final = "default/not-specified"
"""Sent by Infinity's client if its caller names no model."""


class ModelTarget(NamedTuple):
    """The engine and model of a request.

    Attributes:
        name: Name of the model in the response.
        default_prompt_name: Prompt for texts to embed if a request names none.
        adapter: LoRA adapter that the request names as `model:adapter`; None: none.
    """

    engine: AsyncEngine
    name: str
    default_prompt_name: str | None
    adapter: str | None = None


class ModelDescription(NamedTuple):
    """Description of a served model, loaded or not.

    Attributes:
        name: One of its names.
        info: None for a model that is not on this machine yet.
        parent: The name of the model, if `name` is that of one of its LoRA adapters; otherwise None.
    """

    entry: ModelEntry
    name: str
    info: ModelInfo | None
    parent: str | None = None

    @property
    def shown_names(self) -> list[str]:
        """The names of the model, or those of its adapter: each name of the model with the adapter's."""
        suffix = "" if self.parent is None else self.name.removeprefix(self.parent)
        return [name + suffix for name in self.entry.model.shown_names]

    def require_info(self) -> ModelInfo:
        """Returns `info`. Raises EngineUnavailableError if the model must be loaded first."""
        if self.info is None:
            raise EngineUnavailableError(
                f"{self.name} is not described until it is loaded. Send a request to it first.",
                reason=ServerRejectionReason.MODEL_LOADING,
            )
        return self.info


class ModelTable:
    """The served models by name. Requests without a model go to the first model of the right kind.

    While the server starts, requests for preloaded models get a 503, and requests for on-demand models wait. The models
    of its manager start AsyncEngines.

    Attributes:
        manager: Loads and unloads the models.
    """

    def __init__(self, manager: ModelManager) -> None:
        self.entries: Sequence[ModelEntry] = manager.entries
        self.manager = manager
        self._named = {name: entry for entry in manager.entries for name in entry.model.names}

    def find(self, name: str | None, scope: Scope, kinds: Collection[ModelKind] = ()) -> ModelTarget | None:
        """Returns the target of a request and records the model in the request's record.

        The engine is not unloaded until `release`.

        Args:
            name: Model name in the request; None or empty: none.
            scope: ASGI scope of the request.
            kinds: Kinds of models for a request without a name; see `entry`.

        Returns:
            The target; None if the model must be loaded with `find_or_load` first.

        Raises:
            EngineUnavailableError: The server has not started yet.
            ModelNotFoundError: No model has this name. The message lists the served models.
        """
        entry = self.entry(name, kinds)
        if (record := state_of(scope).record) is not None:
            record.model = entry.name
        if entry.status is not ModelStatus.LOADED:
            self._check_started(entry)
            return None
        entry.acquire()
        return self._target(entry, name, scope)

    async def find_or_load(self, name: str | None, scope: Scope, kinds: Collection[ModelKind] = ()) -> ModelTarget:
        """Loads the model of a request and returns the target. Raises the errors of `find` and ModelManager.acquire."""
        entry = self.entry(name, kinds)
        await self.manager.acquire(entry, is_background=state_of(scope).is_batch_line)
        return self._target(entry, name, scope)

    def check_queue(self, state: RequestState) -> None:
        """Raises EngineOverloadedError if a request cannot be accepted, before its body is read.

        Does nothing for several models, because the body names the model.
        """
        engine = self.only_engine
        if engine is not None and engine.is_full:
            if state.record is not None:
                state.record.model = self.entries[0].name
            engine.check_queue(state.client)

    def release(self, scope: Scope) -> None:
        """Releases the engines of a request."""
        state = state_of(scope)
        entries, state.models = state.models, []
        for entry in entries:
            entry.release(time.monotonic())

    async def load_model(self, name: str) -> None:
        """Loads a model. Raises ModelNotFoundError, and EngineUnavailableError if the load fails."""
        if (error := await self.manager.load(self.entry(name))) is not None:
            raise EngineUnavailableError(
                f"{name} could not be loaded: {error}", reason=ServerRejectionReason.MODEL_LOADING
            ) from error

    async def unload_model(self, name: str) -> None:
        """Unloads a model; see ModelManager.unload. Raises ModelNotFoundError."""
        await self.manager.unload(self.entry(name))

    def set_ttl(self, name: str | None, ttl_s: float) -> None:
        """Sets when an idle model is unloaded; see ModelManager.set_ttl. Raises ModelNotFoundError."""
        self.manager.set_ttl(self.entry(name), ttl_s)

    def entry(self, name: str | None, kinds: Collection[ModelKind] = ()) -> ModelEntry:
        """Returns the model with a name, or of a LoRA adapter `model:adapter`.

        Without a name, or for `:adapter`, returns the first model of `kinds`, or else the first model. Raises
        ModelNotFoundError.
        """
        entry = self._named.get(name or "")
        if entry is not None:
            return entry
        model, adapter = _split(name or "")
        entry = self._named.get(model) if model else None
        if adapter is not None and (entry is not None or not model):
            entry = entry or self.entry(None, kinds)
            if entry.info is not None:
                entry.info.adapter_of(adapter)
            return entry
        if entry is None and adapter is not None and (first := _split(model))[0] in self._named:
            raise InvalidRequestError(
                f"model and lora_path name two LoRA adapters of {first[0]}, {quote(first[1])} and {quote(adapter)}. "
                "Send one of them.",
                param="model",
            )
        if not name or name == UNSPECIFIED_MODEL:
            of_kinds = (entry for entry in self.entries if entry.info is not None and entry.info.kind in kinds)
            return next(of_kinds, self.entries[0])
        served = quote_names([entry.name for entry in self.entries])
        raise ModelNotFoundError(f"The model {quote(name)} does not exist; this server has {served}.", param="model")

    def describe(self, name: str | None) -> ModelDescription:
        """Describes a served model without loading it. Raises the errors of `find`."""
        entry = self.entry(name)
        if entry.info is None or entry.status is not ModelStatus.LOADED:
            self._check_started(entry)
        if not name or name in self._named:
            return ModelDescription(entry, name or entry.name, entry.info)
        parent, adapter = _split(name)
        return ModelDescription(entry, name, entry.info, None if adapter is None else parent)

    def describe_all(self) -> list[ModelDescription]:
        """Describes every model and then its adapters. Raises EngineUnavailableError while all are loading."""
        if self.manager.is_starting and not self.loaded_targets():
            raise _starting()
        descriptions = []
        for entry in self.entries:
            descriptions.append(ModelDescription(entry, entry.name, entry.info))
            for adapter in () if entry.info is None else entry.info.served_adapters:
                name = f"{entry.name}:{adapter.name}"
                descriptions.append(ModelDescription(entry, name, entry.info, entry.name))
        return descriptions

    def loaded_targets(self) -> list[ModelTarget]:
        """Returns the targets of all loaded models."""
        return [
            ModelTarget(cast("AsyncEngine", entry.engine), entry.name, entry.model.default_prompt_name)
            for entry in self.entries
            if entry.engine is not None
        ]

    def named_engines(self) -> list[tuple[AsyncEngine, str]]:
        """Returns engine and shown name of all loaded models."""
        return [(target.engine, target.name) for target in self.loaded_targets()]

    @property
    def only_engine(self) -> AsyncEngine | None:
        """The engine of all requests; None if there are several models or it is not loaded."""
        first = self.entries[0]
        is_only = len(self.entries) == 1 and first.status is ModelStatus.LOADED
        return cast("AsyncEngine", first.engine) if is_only else None

    @property
    def is_ready(self) -> bool:
        """Whether the server has started and at least one model can serve."""
        return not self.manager.is_starting and any(entry.can_serve for entry in self.entries)

    @property
    def is_alive(self) -> bool:
        """False if every engine is dead."""
        return not all(entry.state is EngineState.DEAD for entry in self.entries)

    def states(self) -> dict[str, str]:
        """Returns the state of each model by its shown name."""
        states: dict[str, str] = {entry.name: entry.state for entry in self.entries}
        if self.manager.is_starting:
            expected = [e.name for e in self.entries if e.status is ModelStatus.UNLOADED and e.model.is_preloaded]
            states |= dict.fromkeys(expected, EngineState.STARTING)
        return states

    def _target(self, entry: ModelEntry, name: str | None, scope: Scope) -> ModelTarget:
        assert entry.engine is not None
        engine = cast("AsyncEngine", entry.engine)
        state_of(scope).models.append(entry)
        prompt_name = entry.model.default_prompt_name
        if name and name in self._named:
            return ModelTarget(engine, name, prompt_name)
        model, adapter = _split(name or "")
        shown_name = entry.name if adapter is None else f"{model or entry.name}:{adapter}"
        return ModelTarget(engine, shown_name, prompt_name, adapter)

    def _check_started(self, entry: ModelEntry) -> None:
        if self.manager.is_starting and entry.model.is_preloaded:
            raise _starting()


def _split(name: str) -> tuple[str, str | None]:
    """Splits `model:adapter`. The adapter is None for a name without a colon."""
    model, colon, adapter = name.rpartition(":")
    return (model, adapter) if colon else (name, None)


def _starting() -> EngineUnavailableError:
    return EngineUnavailableError(
        "The model is being loaded. Please try again in a moment.", reason=ServerRejectionReason.MODEL_LOADING
    )
