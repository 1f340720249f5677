"""Tables of cases in JSON. The file `cases.json` of a folder has those of its tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def table(test_file: str, name: str) -> Any:
    """Returns a table of `cases.json` in the folder of `test_file`."""
    text = Path(test_file).with_name("cases.json").read_text("utf-8")
    return json.loads(text)[name]


def cases(test_file: str, *columns: str) -> Callable[[Any], Any]:
    """Parametrizes a test with the table that has its name. A table of one column has values instead of rows."""

    def parametrized(test: Any) -> Any:
        names = columns[0] if len(columns) == 1 else columns
        return pytest.mark.parametrize(names, table(test_file, test.__name__))(test)

    return parametrized
