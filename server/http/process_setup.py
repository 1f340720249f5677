"""Garbage collection and the limit of open files of a process that serves HTTP."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
from typing import Final

_COLLECT_AFTER: Final = 10_000
"""Number of new objects after which the garbage collector runs."""
_NO_FILE_LIMIT: Final = 1 << 20
_SPARE_FILES: Final = 16
"""Files that connections leave to the restart of an engine process, which opens seven; see `spare_descriptors`."""


def freeze_gc() -> None:
    """Excludes the objects of start-up from garbage collection, and collects less often.

    Requests wait while the collector walks these objects. At Python's default threshold that takes about 6 % of the
    time of requests, and frees almost nothing: requests are freed without it, even failed ones (see `drop_tracebacks`).
    An idle server runs a full collection, see `HttpServer`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


def raise_file_limit() -> None:
    """Raises the soft limit of open files to _SPARE_FILES below the hard limit: 1024 are too few for connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if hard == resource.RLIM_INFINITY else max(hard - _SPARE_FILES, hard // 2)
    with contextlib.suppress(ValueError, OSError):  # macOS does not grant its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def file_limit() -> int:
    """Returns the current limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_FILE_LIMIT if soft == resource.RLIM_INFINITY else soft


def has_free_file() -> bool:
    """Returns whether this process may open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True
