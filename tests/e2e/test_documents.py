"""The examples of README.md and docs/ work with a real server."""

import gc
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = "http://localhost:8000"


def examples(pattern: str) -> list[object]:
    found = [(path, match) for path in DOCUMENTS for match in re.findall(pattern, path.read_text("utf-8"), re.M | re.S)]
    return [pytest.param(text, id=f"{path.name}-{number}") for number, (path, text) in enumerate(found)]


@pytest.mark.parametrize("command", examples(r"^    (curl http.*?)(?=\n\n|\n    curl|\n```)"))
def test_curl_command_succeeds(command: str, server) -> None:
    words = shlex.split(command.replace("\\\n", "").replace(SHOWN, server.url))
    done = subprocess.run(
        [*words, "--silent", "--show-error", "--fail-with-body"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout[:1000]
    assert done.stdout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", examples(r"^```python\n(.*?)^```"))
def test_python_example_succeeds(program: str, server, tmp_path: Path, capsys) -> None:
    (tmp_path / "example.py").write_text(program.replace(SHOWN, server.url))
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    gc.collect()  # closes the connections of clients that the program leaves open, while warnings are ignored
    assert capsys.readouterr().out.strip() or "print(" not in program, "a program with print shows nothing"
