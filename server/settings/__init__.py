"""Every setting of the command line and of the environment, with its type, its default and its help text.

The only reader of environment variables: field `max_model_len` is the flag `--max-model-len` and the variable
PENSTOCK_MAX_MODEL_LEN. A flag wins over a variable, a variable over a file, a file over the default. Starts nothing and
imports no torch.
"""

from .command_settings import EmbedSettings, InfoSettings
from .engine_settings import EngineSettings
from .environment import ENV_PREFIX, environment_variable, is_in_environment
from .errors import CommandError, UsageError
from .server_settings import ServerSettings
from .unknown import unknown_variables

__all__ = [
    "ENV_PREFIX",
    "CommandError",
    "EmbedSettings",
    "EngineSettings",
    "InfoSettings",
    "ServerSettings",
    "UsageError",
    "environment_variable",
    "is_in_environment",
    "unknown_variables",
]
