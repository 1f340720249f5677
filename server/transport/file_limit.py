"""How many files this process may open: a connection is one."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

_PLENTY: Final = 1 << 20


def raise_file_limit() -> None:
    """Lets this process open as many files as its hard limit allows: 1024 are soon used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Returns how many files this process may open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _PLENTY if soft == resource.RLIM_INFINITY else soft
