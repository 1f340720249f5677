"""Settings of the commands. One declaration gives the flag, the environment variable and the key of the file.

The only reader of environment variables. Field `max_model_len` is the flag `--max-model-len`, the variable
PENSTOCK_MAX_MODEL_LEN and the key `max_model_len`. A flag has precedence over a variable, a variable over the file,
and the file over the default. This package imports no torch.
"""

from .compat_variables import CompatVariables, flag_of_other_server, read_compat_variables
from .declarations import (
    GROUPS,
    BenchSettings,
    CommandSettings,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    ModelSettings,
    ServerSettings,
    TargetSettings,
    read_key_file,
)
from .load import (
    ENV_PREFIX,
    CommandError,
    DeclaredSetting,
    UsageError,
    declared_settings,
    did_you_mean,
    environment_variable,
    flag_of,
    load_settings,
    public_values,
    unknown_variables,
)

__all__ = [
    "ENV_PREFIX",
    "GROUPS",
    "BenchSettings",
    "CommandError",
    "CommandSettings",
    "CompatVariables",
    "DeclaredSetting",
    "EmbedSettings",
    "EvalSettings",
    "InfoSettings",
    "ModelSettings",
    "ServerSettings",
    "TargetSettings",
    "UsageError",
    "declared_settings",
    "did_you_mean",
    "environment_variable",
    "flag_of",
    "flag_of_other_server",
    "load_settings",
    "public_values",
    "read_compat_variables",
    "read_key_file",
    "unknown_variables",
]
