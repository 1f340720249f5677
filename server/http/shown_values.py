"""Values of a request as error messages show them: short, however long or deep they are."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Collection
from typing import Final

MAX_CHARS: Final = 60
MAX_NAMES: Final = 20

# repr that stops early.
_REPR: Final = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 3, 20, 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_CHARS


def shown(value: object) -> str:
    """Returns a JSON value, written as JSON if it is a word and as Python otherwise."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = _REPR.repr(value)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."


def shown_names(names: Collection[str]) -> str:
    """Returns names of fields, as many as a reader wants; "nothing" for none."""
    few = itertools.islice(names, MAX_NAMES)
    first = [name if len(name) <= MAX_CHARS else name[:MAX_CHARS] + "..." for name in few]
    return ", ".join(first if len(names) <= MAX_NAMES else [*first, "..."]) or "nothing"


def short_count(count: int) -> str:
    """Returns 22.7M for 22,713,216."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
