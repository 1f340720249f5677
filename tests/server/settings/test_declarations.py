import dataclasses
import json
from pathlib import Path

import pytest

from penstock.engine.protocol.setting import parse_size, shown_size
from penstock.server.cluster.ray_settings import RayEmbedSettings, RayServeSettings
from penstock.server.commands import cli
from penstock.server.settings import (
    BenchSettings,
    DeclaredSetting,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    ServerSettings,
    declared_settings,
)

HERE = Path(__file__).parent
COMMANDS = {
    "serve": ServerSettings,
    "embed": EmbedSettings,
    "eval": EvalSettings,
    "info": InfoSettings,
    "bench": BenchSettings,
    "ray serve": RayServeSettings,
    "ray embed": RayEmbedSettings,
}
PINNED = json.loads((HERE / "settings.json").read_text())


def flags_of(command: str) -> dict[str, list[str]]:
    parser = cli._parser()
    for word in command.split():
        parser = next(action for action in parser._actions if word in (action.choices or ())).choices[word]
    return {
        action.dest: action.option_strings or [action.dest]
        for action in parser._actions
        if action.dest not in ("help", "file", "url", "data") and not (command == "info" and action.dest == "json")
    }


def plain(default: object) -> object:
    if default is dataclasses.MISSING:
        return "(required)"
    if dataclasses.is_dataclass(default):
        return {}
    return list(default) if isinstance(default, tuple) else default


def pinned(declared: DeclaredSetting, flags: list[str]) -> dict[str, object]:
    found: dict[str, object] = {"words": flags, "default": plain(declared.default)}
    bounds = [declared.setting.min_value, declared.setting.above, declared.setting.max_value]
    if bounds != [None, None, None]:
        found["bounds"] = bounds
    if declared.is_secret:
        found["secret"] = True
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_defaults_and_bounds_are_as_pinned(command: str) -> None:
    declared, flags = declared_settings(COMMANDS[command]), flags_of(command)
    assert flags.keys() == declared.keys()
    assert {name: pinned(each, flags[name]) for name, each in declared.items()} == PINNED[command]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5k", 1500), ("7", 7), ("8 kib", 8192), ("3b", 3), ("1TB", 10**12)],
)
def test_size_is_parsed_and_shown(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert parse_size(shown_size(num_bytes)) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e9", "nan"])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        parse_size(text)
