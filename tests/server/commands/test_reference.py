"""The pages of docs/reference have the settings, models, routes and metrics of the code."""

import subprocess
import sys

import pytest

from penstock.server.commands.reference import PAGES

from ...conftest import ROOT
from ..bodies import table

ROW = table("commands_cases", "row")


@pytest.mark.parametrize("name", ROW)
def test_reference_page_is_up_to_date(name: str) -> None:
    if name in ("routes", "metrics"):  # these create an application with a data folder, which stays open
        command = [sys.executable, "-m", "penstock.server.commands.reference", name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        text = PAGES[name]()
    assert ROW[name] in text
    assert (ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8") == text, "run `make reference`"
