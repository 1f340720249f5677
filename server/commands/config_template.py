"""The file that `penstock config` prints: every setting as a comment, in the groups of --help, with its default."""

from __future__ import annotations

import json
import textwrap
from typing import Final

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from ..settings import ServerSettings
from .help_groups import HELP_GROUPS
from .model_plans import ModelSettings

_HEAD: Final = """\
# Settings of `penstock serve --config FILE`. What stands behind a # is off; a value that is shown is the default.
# A flag of the command line wins over its variable of the environment, and that over this file.
# What is said of a model here holds for every model whose own table says nothing else.
"""
_MODELS: Final = """
# Models. Each has an engine process of its own, and takes every setting of the group "Model" and others of an engine
# (limits of a forward and of the queue, memory) for itself; paths are as on the command line.

# [[models]]
"""
_OWN: Final = ("model", "name", "aliases", "preload", "pin", "ttl")
_ELSEWHERE: Final = ("model", "config", "served_model_name")
_EXAMPLES: Final = {
    "model": '"sentence-transformers/all-MiniLM-L6-v2"',
    "name": '"minilm"',
    "aliases": '["text-embedding-3-small"]',
    "preload": "true",
    "ttl": "600",
}


def config_template() -> str:
    """Returns the file."""
    lines = [_HEAD]
    for title, words in HELP_GROUPS.items():
        fields = [name for name in words if name in ServerSettings.model_fields and name not in _ELSEWHERE]
        if fields:
            lines += [f"# ---- {title} ".ljust(120, "-"), ""]
            lines += [_setting(name, ServerSettings.model_fields[name], words[name]) for name in fields]
    lines.append(_MODELS)
    lines += [
        _comment(ModelSettings.model_fields[name]) + f"# {name} = {_EXAMPLES.get(name, 'false')}\n" for name in _OWN
    ]
    return "\n".join(lines)


def _setting(name: str, info: FieldInfo, word: str) -> str:
    return _comment(info) + f"# {name} = {_default(info, word)}\n"


def _comment(info: FieldInfo) -> str:
    return textwrap.fill(str(info.description), 118, initial_indent="# ", subsequent_indent="# ") + "\n"


def _default(info: FieldInfo, word: str) -> str:
    """Returns a default as TOML has it; where there is none, the word for a value."""
    value = info.default
    if value is None or value == ():
        return f"<{word or 'VALUE'}>"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ByteSize):
        return json.dumps(value.human_readable().replace(".0", ""))
    if isinstance(value, int | float | str):
        return json.dumps(value)
    return "{}"
