"""The key of a cached row: a digest of the model's identity, the parameters, the namespace and the tokens.

The identity of a model is a digest of everything that affects its vectors except tokens and request parameters: the
contents (not the names) of its weights, config.json files and code; the values resolved from them and from the
operator's settings (ModelInfo); the versions of the libraries; and NUMERICS. Values that only affect the tokens or
check requests are left out: servers that differ only in these share their vectors.

A key is made in two steps: the model, the parameters and the namespace, which are the same for many inputs; then the
tokens. Every part has a fixed length or its length before it, so that different parts never give the same bytes.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import struct
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...protocol.messages import TokenizedInput
from ...protocol.model_info import ModelInfo
from ...protocol.params import PoolingParams
from ...protocol.tasks import PoolingTask

NUMERICS: Final = 7
"""Version of penstock's arithmetic. Increase it with every change that may change a bit of a vector."""
CHANGES_NO_VECTOR: Final = frozenset(
    {
        *("name", "path", "root", "sources", "labels", "problem_type"),
        "default_adapter",  # it is resolved into the parameters of every request
        "num_lanes",  # rows are bitwise equal for any number of lanes
        # The following affect the tokens, which are part of every key.
        *("max_model_len", "auto_truncate", "do_lower_case", "prompts", "default_prompt_name", "score_template"),
        *(
            "pair_chat",
            "input_chat",
            "enable_chunked_processing",
            "max_embed_len",
            "chunk_overlap",
            "chunked_processing_mode",
        ),
        # The following are resolved into the parameters of every request, which are part of its key, or check them.
        *("normalize", "dimensions", "use_activation", "step_tag_id", "returned_token_ids"),
        *("is_matryoshka", "matryoshka_dimensions", "default_is_query"),
        # The following affect only classes, which are not cached.
        *("activation", "logit_mean", "logit_sigma", "classifier_tokens", "classifier_method"),
    }
)
"""Fields of ModelInfo that are not part of the identity."""
_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.json", "*.py")
_READ_BYTES: Final = 4 * 2**20
_REPOSITORY_SEPARATOR: Final = "--"
"""Separates a repository from its class in an auto_map."""
KEY_BYTES: Final = 32
UNKEYED_PARAMS: Final = frozenset({"truncate_prompt_tokens", "reject_too_long", "truncation_side", "any_dimensions"})
"""Fields of PoolingParams that are not part of the key, because they change no vector of the same tokens."""
_CACHED_TASKS: Final = frozenset({PoolingTask.EMBED, PoolingTask.SPARSE_EMBED})
"""Tasks with one vector per input. Rows of token-level tasks would be too large."""
_NUM_PREFIXES: Final = 256


class UnknownIdentityError(Exception):
    """The identity of a model cannot be determined. The message states the reason."""


def identity_of(info: ModelInfo, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
    """Returns the identity of a model that has been loaded. Reads all its weights: 0.9 s for a gigabyte in memory.

    Args:
        info: The resolved description of the model.
        is_wanted: Called during reading, in the reading thread. False ends the reading.

    Raises:
        UnknownIdentityError: `is_wanted` returned False, the folder is empty, or the model runs code from elsewhere.
        OSError: A file cannot be read.
    """
    if not info.packed and _REPOSITORY_SEPARATOR in str(info.config.get("auto_map")):
        raise UnknownIdentityError("it runs code of another repository")
    resolved = resolved_fields(info, CHANGES_NO_VECTOR)
    versions = {name: importlib.metadata.version(name) for name in _libraries(info)}
    table = {"numerics": NUMERICS, "machine": platform.machine(), "versions": versions, "model": resolved}
    digest = blake2b(json.dumps(table, sort_keys=True).encode())
    if not _files(info):
        raise UnknownIdentityError(f"{info.path} holds none of {', '.join(_FILES)}")
    add_files(digest, info, is_wanted)
    return digest.digest()


def resolved_fields(info: ModelInfo, left_out: Container[str]) -> dict[str, Any]:
    """Returns the fields of a model, and of its model of queries, without the names in `left_out`.

    The names are part of the identity of vector caches and embed jobs: a renamed field makes stored ones invalid.
    """
    fields = {name: value for name, value in dataclasses.asdict(info).items() if name not in left_out}
    parts = {"query_model": info.query_model, "image": info.image}
    return fields | {name: resolved_fields(part, left_out) for name, part in parts.items() if part is not None}


def add_files(digest: blake2b, info: ModelInfo, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Adds the names and contents of a model's files to a digest. For arguments and errors see `identity_of`."""
    for path in _files(info):
        content = blake2b()
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                if not is_wanted():
                    raise UnknownIdentityError("it is not wanted any more")
                content.update(part)
        digest.update(struct.pack("<Q", len(path.name)) + path.name.encode() + content.digest())


def stamp_of(folder: Path) -> bytes:
    """Returns a digest that changes when a file of a folder, or a GGUF file, changes. Raises OSError as `stat` does."""
    digest = blake2b()
    paths = [folder]
    if not folder.is_file():
        patterns = [pattern for name in _FILES for pattern in (name, f"*/{name}")]
        paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    for path in paths:
        status = path.stat()
        digest.update(f"{path}\0{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\0".encode())
    return digest.digest()


def _libraries(info: ModelInfo) -> Iterator[str]:
    yield "numpy"
    if info.kernels == "torch":
        yield "torch"
    if not info.packed:
        yield "transformers"


def _files(info: ModelInfo) -> list[Path]:
    """Returns the files of a model, its Dense modules, its model of queries and its adapters, in a fixed order."""
    if Path(info.path).is_file():
        return [Path(info.path)]
    models = [part for part in (info, info.query_model, info.image) if part is not None]
    folders = []
    for model in models:
        names = ("", *(dense.folder for dense in model.dense))
        folders += [Path(os.path.normpath(Path(model.path, name))) for name in names]
    folders += [Path(adapter.folder) for adapter in info.adapters if adapter.folder is not None]
    files = [file for folder in folders for pattern in _FILES for file in sorted(folder.glob(pattern))]
    return [file for file in dict.fromkeys(files) if file.is_file()]


class CacheKeyBuilder:
    """Builds the cache keys of one model.

    Args:
        secret: Secret of the cache. Keys cannot be computed without it.
    """

    def __init__(self, secret: bytes, identity: bytes, embedding_size: int) -> None:
        @lru_cache(_NUM_PREFIXES)
        def prefix(params: PoolingParams, namespace: str, transform: str) -> blake2b:
            fields = {name: value for name, value in dataclasses.asdict(params).items() if name not in UNKEYED_PARAMS}
            if fields["dimensions"] == embedding_size:
                fields["dimensions"] = None
            canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
            digest = blake2b(digest_size=KEY_BYTES, key=secret)
            for part in (identity, canonical.encode(), namespace.encode(), transform.encode()):
                digest.update(struct.pack("<Q", len(part)) + part)
            return digest

        self._prefix = prefix

    def build(
        self, inputs: Sequence[TokenizedInput], params: PoolingParams, namespace: str, transform: str = ""
    ) -> list[bytes]:
        """Returns the key of each input's outputs.

        Args:
            inputs: Tokenized inputs.
            params: Resolved.
            namespace: Namespace of the client; "" if clients share rows.
            transform: Name of the function that is applied to the outputs before they are stored; "" for none.
        """
        prefix = self._prefix(params, namespace, transform)
        keys = []
        for tokens in inputs:
            digest = prefix.copy()
            boundaries = (len(tokens), tokens.type_boundary, tokens.num_skipped_tokens, tokens.num_masked)
            digest.update(struct.pack("<4q", *boundaries))
            digest.update(np.ascontiguousarray(tokens.token_ids, "<i4").data)
            for image in tokens.images:
                digest.update(struct.pack("<2q", *image.grid))
                digest.update(np.ascontiguousarray(image.pixels).data)
            keys.append(digest.digest())
        return keys


def is_cacheable(params: PoolingParams, transform: str = "") -> bool:
    """Whether outputs of such a request are cached: one vector per input, or the result of an OutputTransform."""
    return bool(transform) or {params.task, *params.extra_tasks} <= _CACHED_TASKS
