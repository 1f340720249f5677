"""docs/reference/routes.md and metrics.md have the routes and metrics of the code."""

import subprocess
import sys

import pytest

from ...conftest import ROOT

ROW = {"routes": "| `POST /v2/rerank` | rerank |", "metrics": "| `penstock_batches_ended_total` | counter |"}


@pytest.mark.parametrize("name", ROW)
def test_reference_page_is_up_to_date(name: str) -> None:
    command = [sys.executable, "-m", "penstock.server.commands.api_text", name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ROW[name] in text
    assert (ROOT / "docs" / "reference" / f"{name}.md").read_text("utf-8") == text, "run `make reference`"
