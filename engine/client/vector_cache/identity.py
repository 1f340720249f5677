"""The identity of a model: a digest of everything that decides its vectors except tokens and request parameters.

It is of the contents of the files, not of their names: weights, the config.json files and code beside them. What was
resolved from them and from the operator's settings comes on top (ModelInfo), the libraries that compute, and the number
of our own arithmetic. What only decides which tokens there are, or how requests are checked, is left out: servers that
differ in nothing else share their vectors.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

from ...protocol.model_info import ModelInfo

NUMERICS: Final = 5
"""Number of our arithmetic. Raise it with every change after which a vector may differ in a bit."""
CHANGES_NO_VECTOR: Final = frozenset(
    {
        *("name", "path", "root", "sources", "labels", "problem_type"),
        "adapters",  # none is applied
        "num_lanes",  # rows are bitwise equal on any number of lanes
        # These decide the tokens, which are part of every key.
        *("max_model_len", "auto_truncate", "do_lower_case", "prompts", "default_prompt_name", "score_template"),
        *("pair_chat", "enable_chunked_processing", "max_embed_len", "chunk_overlap", "chunked_processing_mode"),
        # These are resolved into the parameters of every request, which are part of its key, or check them.
        *("normalize", "dimensions", "use_activation", "step_tag_id", "returned_token_ids"),
        *("is_matryoshka", "matryoshka_dimensions"),
        # These are of classes.
        *("activation", "logit_mean", "logit_sigma", "classifier_tokens", "classifier_method"),
    }
)
"""Fields of ModelInfo that are no part of the identity; all others are."""
_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.json", "*.py")
_READ_BYTES: Final = 4 * 2**20
_ELSEWHERE: Final = "--"
"""In an auto_map, between a repository and the class in it."""


class UnknownIdentityError(Exception):
    """The identity of a model cannot be determined; the message says why."""


def identity_of(info: ModelInfo, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
    """Returns the identity of a model that has been loaded. Reads all its weights: 0.9 s for a gigabyte in memory.

    Args:
        info: The resolved description of the model.
        is_wanted: Asked on the way, from the thread that reads.

    Raises:
        UnknownIdentityError: It is not wanted any more, the folder holds no files, or code runs that is not in it.
        OSError: A file cannot be read.
    """
    if not info.packed and _ELSEWHERE in str(info.config.get("auto_map")):
        raise UnknownIdentityError("it runs code of another repository")
    resolved = {name: value for name, value in dataclasses.asdict(info).items() if name not in CHANGES_NO_VECTOR}
    versions = {name: importlib.metadata.version(name) for name in _libraries(info)}
    table = {"numerics": NUMERICS, "machine": platform.machine(), "versions": versions, "model": resolved}
    digest = blake2b(json.dumps(table, sort_keys=True).encode())
    if not _files(info):
        raise UnknownIdentityError(f"{info.path} holds none of {', '.join(_FILES)}")
    add_files(digest, info, is_wanted)
    return digest.digest()


def add_files(digest: blake2b, info: ModelInfo, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Adds the names and contents of a model's files to a digest; arguments and errors as `identity_of` has them."""
    for path in _files(info):
        content = blake2b()
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                if not is_wanted():
                    raise UnknownIdentityError("it is not wanted any more")
                content.update(part)
        digest.update(struct.pack("<Q", len(path.name)) + path.name.encode() + content.digest())


def stamp_of(folder: Path) -> bytes:
    """Returns a digest that changes when a file of a folder changes. Raises OSError as `stat` does."""
    digest = blake2b()
    files = (file for pattern in _FILES for place in (pattern, f"*/{pattern}") for file in folder.glob(place))
    for path in sorted(files):
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
    """Returns the files of a model in one order, those of Dense modules too, wherever the folder lies."""
    folders = [Path(info.path), *(Path(os.path.normpath(Path(info.path, dense.folder))) for dense in info.dense)]
    files = [file for folder in folders for pattern in _FILES for file in sorted(folder.glob(pattern))]
    return [file for file in dict.fromkeys(files) if file.is_file()]
