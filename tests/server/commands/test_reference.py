"""The pages of docs/reference have the settings, models, routes and metrics of the code."""

import subprocess
import sys

from penstock.server.commands.reference import PAGES

from ...conftest import ROOT
from ...tables import table

ROW = table(__file__, "row")


def test_reference_pages_are_up_to_date() -> None:
    # The pages of routes and metrics create an application with a data folder, which stays open.
    command = [sys.executable, "-m", "penstock.server.commands.reference", "routes", "metrics"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    texts = [PAGES["settings"](), PAGES["models"](), *(f"# List of {part}" for part in text.split("# List of ")[1:])]
    for (name, row), page in zip(ROW.items(), texts, strict=True):
        assert row in page
        assert (ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8") == page, "run `make reference`"
