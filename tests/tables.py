"""Tables of cases of the tests of the engine and of the kernels."""

import json
from pathlib import Path
from typing import Any


def table(test_file: str, name: str) -> Any:
    """Returns a table of `cases.json` in the folder of `test_file`."""
    text = Path(test_file).with_name("cases.json").read_text("utf-8")
    return json.loads(text)[name]
