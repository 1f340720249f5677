"""docker/chart/check_release.py, which `helm test` runs, against a real server."""

import runpy
import subprocess
import sys
from pathlib import Path

from ..servers import Server

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "chart" / "check_release.py"


def test_release_check_sends_a_request_of_the_model(server: Server) -> None:
    command = [sys.executable, "-c", SCRIPT.read_text("utf-8"), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    line = f"{server.url}: sentence-transformers/all-MiniLM-L6-v2 responds on /pooling\n"
    assert (done.returncode, done.stdout) == (0, line)
    failed = subprocess.run([*command, f"{server.url}/nowhere"], capture_output=True, timeout=120, check=False)
    assert failed.returncode == 1


def test_release_check_uses_the_first_key_of_the_file(tmp_path: Path) -> None:
    api_key = runpy.run_path(str(SCRIPT))["api_key"]
    (tmp_path / "keys").write_text("# comment\n\n  first \nsecond\n")
    assert (api_key(tmp_path / "keys"), api_key(tmp_path / "none")) == ("first", None)
