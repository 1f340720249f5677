"""The cache of one model: looks inputs up before they run, and stores the results."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from penstock.kernels.cpu import CpuLibrary, shared_library

from ...protocol.batch_outputs import Arrays
from ...protocol.messages import TokenizedInput
from ...protocol.model_info import ModelInfo
from ...protocol.params import PoolingParams
from ...protocol.results import stacked
from ...protocol.tasks import PoolingTask
from ..stats import CacheStats
from .cache import VectorCache
from .keys import CacheKeyBuilder, UnknownIdentityError, identity_of, is_cacheable, stamp_of

logger = logging.getLogger("penstock.engine")

_MANY_TOKENS: Final = 250_000
"""The keys of more tokens are computed in a thread. Computing the keys of this many takes about a millisecond."""
_MANY_NUMBERS: Final = 1_000_000
"""More values are truncated in a thread. Truncating this many takes about a millisecond."""
_NUM_PARAMS: Final = 64
_MIN_NORM: Final = 1e-12

Compute = Callable[[list[TokenizedInput], PoolingParams], Awaitable[Sequence[Arrays]]]


def full_width_params(params: PoolingParams) -> PoolingParams | None:
    """Returns the parameters of the cached row of a request: all dimensions, not normalised.

    Returns:
        None if the request itself has these parameters, or has outputs that are not embeddings.
    """
    if not is_cacheable(params) or PoolingTask.EMBED not in (params.task, *params.extra_tasks):
        return None
    full_width = params.clone(dimensions=None, normalize=False, use_activation=False)
    return None if full_width == params else full_width


def truncate_embeddings(outputs: Sequence[Arrays], params: PoolingParams, library: CpuLibrary | None) -> list[Arrays]:
    """Truncates and normalises embeddings of full width. Other outputs are not changed.

    The C library returns the same bits as an engine on this machine. Results of numpy, torch and GPUs differ by at most
    2.5e-7 of the row's norm.

    Args:
        outputs: Outputs of each input, with the full "embedding" [W] float32. Not modified.
        params: Resolved parameters.
        library: The C library; None uses numpy.
    """
    rows = stacked([output["embedding"] for output in outputs])
    width = min(params.dimensions or rows.shape[1], rows.shape[1])
    normalize = bool(params.normalize)
    if library is not None:
        truncated = library.truncate_rows(rows, width, normalize=normalize)
    else:
        truncated = rows[:, :width]
        if normalize:
            norms = np.sqrt(np.square(truncated, dtype=np.float64).sum(axis=1, keepdims=True))
            truncated = truncated / np.maximum(norms, _MIN_NORM).astype(np.float32)
    return [{**output, "embedding": row} for output, row in zip(outputs, truncated, strict=True)]


class ModelCache:
    """Looks up inputs of one model. Belongs to the event loop of its engine.

    Looks up and stores nothing until the identity of the loaded model is known.

    Attributes:
        stats: Counters.
    """

    def __init__(self, cache: VectorCache) -> None:
        self.stats = CacheStats()
        self._cache = cache
        self._key_builder: CacheKeyBuilder | None = None
        self._file_stamps: set[bytes | None] = set()
        self._identity: bytes | None = None
        self._opening: asyncio.Task[None] | None = None
        self._num_opened = 0
        # Equal requests share one object, as in AsyncEngine.
        self._full_width_params = lru_cache(_NUM_PARAMS)(full_width_params)
        self._library = shared_library()

    def record_files(self, model: str) -> None:
        """Records the state of a model's files before an engine process loads them. `model` is a folder or a hub id."""
        self._file_stamps.add(_stamp(model))

    def open(self, model: str, info: ModelInfo, *, has_one_replica: bool = True) -> None:
        """Computes the identity of the loaded model in a thread, then enables the cache.

        Args:
            model: The folder that the replicas have loaded.
            info: The resolved description of the model.
            has_one_replica: False if other replicas may have loaded an earlier version of the files.
        """
        self.close()
        if {PoolingTask.EMBED, PoolingTask.SPARSE_EMBED} & set(info.tasks):
            self._opening = asyncio.create_task(self._open(model, info, has_one_replica=has_one_replica))

    async def wait(self) -> None:
        """Waits until the identity of the model is known, or cannot be determined."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    def close(self) -> None:
        """Closes the cache and cancels a running `open`."""
        self._set_key_builder(None)
        self._num_opened += 1  # ends the thread of an earlier `open`
        if self._opening is not None:
            self._opening.cancel()

    def _set_key_builder(self, key_builder: CacheKeyBuilder | None) -> None:
        self._key_builder = key_builder
        self.stats.is_open = key_builder is not None

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        namespace: str,
        compute: Compute,
        transform: str = "",
    ) -> list[Arrays]:
        """Returns the outputs of each input. `compute` runs each missing input once.

        Embeddings are computed and stored whole, then truncated and normalised here, even while the cache is closed, so
        that a text always has the same vector.

        Args:
            inputs: Tokenized inputs.
            params: Resolved parameters.
            namespace: Namespace of the client; see RequestOptions.
            compute: Returns the outputs of inputs for the given parameters.
            transform: Name of the function that `compute` applies to the outputs; see CacheKeyBuilder.build.
        """
        full_width = self._full_width_params(params)
        outputs = await self._find_or_compute(inputs, full_width or params, namespace, compute, transform)
        if full_width is None or not outputs:
            return outputs
        if sum(output["embedding"].size for output in outputs) > _MANY_NUMBERS:
            return await asyncio.to_thread(truncate_embeddings, outputs, params, self._library)
        return truncate_embeddings(outputs, params, self._library)

    async def _find_or_compute(
        self, inputs: Sequence[TokenizedInput], params: PoolingParams, namespace: str, compute: Compute, transform: str
    ) -> list[Arrays]:
        key_builder = self._key_builder
        if key_builder is None or not is_cacheable(params, transform):
            return list(await compute(list(inputs), params))
        if sum(map(len, inputs)) > _MANY_TOKENS:
            keys = await asyncio.to_thread(key_builder.build, inputs, params, namespace, transform)
        else:
            keys = key_builder.build(inputs, params, namespace, transform)
        arrays, num_in_memory = await self._cache.find(list(dict.fromkeys(keys)))
        missing: dict[bytes, TokenizedInput] = {}
        for key, tokens in zip(keys, inputs, strict=True):
            if key not in arrays:
                missing.setdefault(key, tokens)
        self.stats.num_memory_hits += num_in_memory
        self.stats.num_disk_hits += len(arrays) - num_in_memory
        self.stats.num_misses += len(missing)
        if missing:
            outputs = await compute(list(missing.values()), params)
            is_current = self._key_builder is key_builder  # False if the model was replaced during `compute`
            for key, output in zip(missing, outputs, strict=True):
                arrays[key] = output
                if is_current:
                    self._cache.store(key, output)
        return [arrays[key] for key in keys]

    async def _open(self, model: str, info: ModelInfo, *, has_one_replica: bool) -> None:
        number = self._num_opened
        try:
            identity = await asyncio.to_thread(identity_of, info, lambda: self._num_opened == number)
        except (UnknownIdentityError, OSError) as error:
            logger.warning("vectors of %s are not cached: %s", info.name, error)
            return
        stamps = self._file_stamps
        self._file_stamps = set()
        has_changed = not has_one_replica and self._identity not in (None, identity)
        if stamps - {_stamp(model), None} or has_changed:
            logger.warning("vectors of %s are not cached: its files have changed while it was loaded", info.name)
            return
        self._identity = identity
        self._set_key_builder(CacheKeyBuilder(self._cache.secret, identity, info.embedding_size))


def _stamp(model: str) -> bytes | None:
    """Returns the stamp of a local folder or file; None for a hub id, because snapshots do not change."""
    try:
        folder = Path(model).expanduser().resolve()
        return stamp_of(folder) if folder.exists() else None
    except OSError:  # the folder is changing: return a unique stamp
        return secrets.token_bytes()
