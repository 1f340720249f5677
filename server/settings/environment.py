"""Names of environment variables, and whether they are set."""

from __future__ import annotations

import os
from typing import Final

ENV_PREFIX: Final = "PENSTOCK_"


def is_in_environment(field: str) -> bool:
    """Returns whether the environment sets a field; empty variables do not."""
    return bool(os.environ.get(environment_variable(field)))


def environment_variable(field: str) -> str:
    """Returns the environment variable of a settings field."""
    return ENV_PREFIX + field.upper()
