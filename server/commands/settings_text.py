"""All settings as text: the file that `penstock config` prints, and the reference page docs/reference/settings.md.

`python -m penstock.server.commands.settings_text` prints the page; `make reference` writes it.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from penstock.engine.protocol.setting import parse_size, shown_size

from ..cluster.ray_settings import RayEmbedSettings, RayServeSettings
from ..settings import (
    GROUPS,
    BenchSettings,
    DeclaredSetting,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    ModelSettings,
    ServerSettings,
    declared_settings,
    environment_variable,
    flag_of,
)
from .model_plans import NOT_IN_FILE

_FILE_HEAD: Final = """\
# Settings of `penstock serve --config FILE`. Lines that start with # have no effect and show the defaults.
# Flags have precedence over environment variables, and variables over this file.
# Model settings at the top of this file apply to every model whose own table does not set them.
"""
_FILE_MODELS: Final = """
# Models. Each has its own engine process. Its table may have all settings of the group "Model" and all other
# engine settings (limits of a forward and of the queue, memory). Paths are relative to the working directory.

# [[models]]
"""
_TABLE_KEYS: Final = ("model", "name", "aliases", "preload", "pin", "ttl")
_EXAMPLES: Final = {
    "model": '"sentence-transformers/all-MiniLM-L6-v2"',
    "name": '"minilm"',
    "aliases": '["text-embedding-3-small"]',
    "preload": "true",
    "ttl": "600",
}
_COMMANDS: Final = {
    "serve": ServerSettings,
    "embed": EmbedSettings,
    "eval": EvalSettings,
    "info": InfoSettings,
    "bench": BenchSettings,
    "ray serve": RayServeSettings,
    "ray embed": RayEmbedSettings,
}
_PAGE_HEAD: Final = """\
# Settings

Every setting is a flag (`--max-queue-s 6`), an environment variable (`PENSTOCK_MAX_QUEUE_S=6`) and, for `penstock
serve`, a key of the TOML file of `--config` (`max_queue_s = 6`). A flag has precedence over a variable, a variable
over the file, the file over the default. Flags without a value have an opposite: `--no-access-log`. Lists are separated
by commas; sizes are numbers of bytes or texts such as 2GiB and 500MB.

This page is generated from the declarations in `engine/protocol/config.py`, `server/settings/declarations.py` and
`server/cluster/ray_settings.py` by `make reference`. Settings without a command name belong to all commands
with a model.
"""
_TABLES_HEAD: Final = """\
## Tables of models

A table `[[models]]` of the TOML file describes one model. It takes the engine settings above (all settings of
`penstock info` except the log settings) and these keys; `penstock config` prints an example.

| key | default | meaning |
|---|---|---|
"""


def config_template() -> str:
    """Returns a TOML file with every setting as a comment with its default, grouped as in the help."""
    lines = [_FILE_HEAD]
    settings = [declared for declared in declared_settings(ServerSettings).values() if declared.name not in NOT_IN_FILE]
    for group in GROUPS:
        if members := [declared for declared in settings if declared.setting.group == group]:
            lines += [f"# ---- {group} ".ljust(120, "-"), ""]
            lines += [_comment(declared) + f"# {declared.name} = {_toml_default(declared)}\n" for declared in members]
    lines.append(_FILE_MODELS)
    table = declared_settings(ModelSettings)
    lines += [_comment(table[name]) + f"# {name} = {_EXAMPLES.get(name, 'false')}\n" for name in _TABLE_KEYS]
    return "\n".join(lines)


def reference_page() -> str:
    """Returns docs/reference/settings.md."""
    commands = {command: declared_settings(kind) for command, kind in _COMMANDS.items()}
    settings = {
        (name, declared.setting.help): declared for found in commands.values() for name, declared in found.items()
    }
    parts = [_PAGE_HEAD]
    for group in GROUPS:
        rows = [
            _row(declared, [command for command, found in commands.items() if found.get(declared.name) == declared])
            for declared in settings.values()
            if declared.setting.group == group
        ]
        parts.append(
            "\n".join([f"## {group}\n", "| flag | variable | default | meaning |", "|---|---|---|---|", *rows, ""])
        )
    table = declared_settings(ModelSettings)
    rows = [f"| `{name}` | {_page_default(table[name])} | {_cell(table[name])} |" for name in _TABLE_KEYS]
    return "\n".join([*parts, _TABLES_HEAD + "\n".join(rows) + "\n"])


def _row(declared: DeclaredSetting, commands: Sequence[str]) -> str:
    word = f" {declared.metavar}" if declared.metavar else ""
    whose = "" if "info" in commands else f" ({', '.join(commands)})"
    flag, variable = f"`{flag_of(declared.name)}{word}`{whose}", f"`{environment_variable(declared.name)}`"
    return f"| {flag} | {variable} | {_page_default(declared)} | {_cell(declared)} |"


def _page_default(declared: DeclaredSetting) -> str:
    return "required" if declared.is_required else f"`{declared.shown_default}`" if declared.shown_default else ""


def _cell(declared: DeclaredSetting) -> str:
    return declared.setting.help.replace("|", r"\|")


def _comment(declared: DeclaredSetting) -> str:
    return textwrap.fill(declared.setting.help, 118, initial_indent="# ", subsequent_indent="# ") + "\n"


def _toml_default(declared: DeclaredSetting) -> str:
    """Returns a default as a TOML value; the metavar if there is none."""
    if declared.default is None or declared.default == ():
        return f"<{declared.metavar}>"
    if declared.setting.parse is parse_size:
        return json.dumps(shown_size(declared.default))
    return json.dumps(declared.default) if isinstance(declared.default, bool | int | float | str) else "{}"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
