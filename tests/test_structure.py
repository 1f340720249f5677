"""Documents, docstrings and comments name files that exist; docs/internals/names.md matches the packages."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "engine", "kernels")
INTERNALS = ROOT / "docs" / "internals"
ARCHITECTURE = (INTERNALS / "architecture.md").read_text("utf-8")
OF_OTHER_PROJECTS = frozenset({"modules/pooling.py", "mxbai_rerank_v2.py"})
"""Files of other projects in comments."""

MENTION = re.compile(r"(?<![\w.*-])(?:[\w.-]+/)*\w+\.py\b(?![*{])")


def test_import_order_equals_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {c["id"]: c["layers"] for c in contracts if c["type"] == "layers"}
    text = (INTERNALS / "names.md").read_text("utf-8")
    drawn = dict(re.findall(r"<!-- order: ([\w-]+) -->\n```\n(.*?)```", text, re.DOTALL))
    assert set(drawn) == {"engine-packages", "server-packages"}
    for name, picture in drawn.items():
        assert [re.split(r"\s{2,}", line.strip())[0] for line in picture.splitlines()] == layers[name], name


def test_reading_order_is_short_and_names_files_once() -> None:
    blocks = dict(re.findall(r"<!-- reading: (\w+) -->\n```\n(.*?)```", ARCHITECTURE, re.DOTALL))
    lists = {name: [line.split()[0] for line in text.splitlines()] for name, text in blocks.items()}
    assert len(lists["server"]) + len(lists["request"]) <= 15
    assert len(lists["chunk"]) <= 6
    paths = [path for own in lists.values() for path in own]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert len(set(paths)) == len(paths)


def tracked(*suffixes: str) -> list[Path]:
    """The source files of the checkout with one of the suffixes, or all."""
    folders = (*LAYERS, "benchmarks", "docker", "docs", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    wanted = [path for path in files if path.is_file() and not {"__pycache__", ".venv"} & set(path.parts)]
    return sorted(path for path in wanted if not suffixes or path.name.endswith(suffixes))


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Docstrings and comments of a module, or the lines of another file, with line numbers."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    texts = [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return comments + [(docstring.lineno, str(docstring.value)) for docstring in texts]


def wrong_mentions(paths: list[Path], pattern: re.Pattern[str], is_known: Callable[[str], bool]) -> list[str]:
    """Mentions in prose that do not exist. Reads the prose only of files with a wrong mention."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {mention}"
        for path in paths
        if not all(map(is_known, pattern.findall(path.read_text("utf-8"))))
        for line, text in prose(path)
        for mention in pattern.findall(text)
        if not is_known(mention)
    ]


def test_every_file_that_prose_names_exists() -> None:
    """A mention with folders is the end of a path."""
    paths = {str(path.relative_to(ROOT)) for path in tracked(".py")}
    names = {Path(path).name for path in paths} | OF_OTHER_PROJECTS

    @cache
    def is_known(mention: str) -> bool:
        # usr/: paths inside the image
        end = "/" + mention.removeprefix("../")  # a link from docs
        known = mention in names or any(f"/{path}".endswith(end) for path in paths)
        return known or mention.startswith("usr/")

    files = tracked(".py", ".md", ".yaml", ".yml", ".toml", "Makefile", "Dockerfile")
    wrong = wrong_mentions(files, MENTION, is_known)
    assert not wrong, "\n".join(wrong)
