"""The examples run against a real server. Skips examples without their packages."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
PENSTOCK = Path(sys.executable).with_name("penstock")
PAGE = (ROOT / "docs" / "examples.md").read_text("utf-8")


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = load_runner()
EXAMPLES = pytest.mark.parametrize("example", RUNNER.EXAMPLES, ids=lambda path: path.stem)


def packages_of(example: Path) -> set[str]:
    """The packages that an example imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(example.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names)


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    if not PENSTOCK.is_file():
        pytest.skip(f"needs {PENSTOCK}: make install")
    with RUNNER.serving(str(PENSTOCK)) as url:
        yield url


@pytest.mark.slow
@EXAMPLES
def test_example_succeeds(example: Path, url: str) -> None:
    missing = sorted(name for name in packages_of(example) if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make examples` runs it in its own environment")
    assert RUNNER.run(example, url, str(PENSTOCK))


@EXAMPLES
def test_example_is_short_documented_and_has_pinned_packages(example: Path) -> None:
    text = example.read_text("utf-8")
    assert len(text.splitlines()) < 60
    assert "assert " in text  # an example checks its result
    assert f"](../examples/{example.name})" in PAGE
    pins = (FOLDER / "requirements.txt").read_text("utf-8").lower().replace("-", "_")
    own_names = {"helm_python": "helm_python_sdk", "llama_index": "llama_index_core", "haystack": "haystack_ai"}
    own_names |= {"skimage": "scikit_image", "PIL": "pillow"}
    for name in packages_of(example):
        assert f"{own_names.get(name, name)}==" in pins.replace("pyyaml", "yaml"), name


def test_unknown_example_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert RUNNER.main("penstock", "none.py") == 2
    assert "no example none.py; there are" in capsys.readouterr().err
