"""Returns free memory of the C library's heap to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Returns the free pages of glibc's heaps to the system, which glibc keeps otherwise. Other C libraries keep them.

    Takes 0.1 to 0.4 ms for each MiB that is returned. Other Python threads run meanwhile.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
