"""Errors of the engine in the field names of a dialect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.engine.protocol.errors import InvalidRequestError


@contextmanager
def fields_named(
    inputs: str, options: Mapping[str, str] | None = None, phrases: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Renames fields in the errors that are raised inside, so that clients read of what they have sent.

    Args:
        inputs: The dialect's name of the engine's `input`.
        options: The engine's names of options to the dialect's, in the messages too.
        phrases: Other parts of messages, such as the way out, to the dialect's.
    """
    try:
        yield
    except InvalidRequestError as error:
        for phrase, other in (phrases or {}).items():
            error.message = error.message.replace(phrase, other)
        for name, other in (options or {}).items():
            error.message = re.sub(rf"\b{re.escape(name)}\b", other, error.message)
        if error.param is not None:
            error.param = {"input": inputs, **(options or {})}.get(error.param, error.param)
        raise
