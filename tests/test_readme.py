"""README.md says what is there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_tree_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("readme_tree", ROOT / "tests" / "readme_tree.py")
    assert spec is not None
    assert spec.loader is not None
    readme_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_tree)
    assert readme_tree.written(README) == README, "run `make tree`"


@pytest.mark.parametrize("command", ["serve", "embed", "info"])
def test_commands_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.server.commands.cli import main

    assert f"penstock {command}" in README
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    if command == "serve":
        shown = capsys.readouterr().out
        for flag in re.findall(r"`(--[a-z-]+)", README):
            assert flag in shown or flag == "--output", flag


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text("utf-8")):
        for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
