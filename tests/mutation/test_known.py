"""The list of known changes is of today's code."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHANGES = tomllib.loads((HERE / "known.toml").read_text())["change"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change["name"])
def test_what_a_change_replaces_stands_once_in_its_file(change: dict[str, str]) -> None:
    assert (ROOT / change["file"]).read_text().count(change["old"]) == 1
