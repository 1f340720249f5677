"""Variables that look like settings and are none."""

from __future__ import annotations

import os

from .command_settings import EmbedSettings
from .environment import ENV_PREFIX, environment_variable
from .server_settings import ServerSettings


def unknown_variables() -> list[str]:
    """Returns the PENSTOCK_ variables of the environment that no setting reads, such as misspelt ones."""
    fields = {field for cls in (ServerSettings, EmbedSettings) for field in cls.model_fields}
    known = {environment_variable(field) for field in fields}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
