"""Files and names that documents, docstrings and comments mention exist; docs/structure.md shows the import order."""

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
STRUCTURE = (ROOT / "docs" / "structure.md").read_text("utf-8")
OF_OTHER_PROJECTS = frozenset({"modules/pooling.py", "mxbai_rerank_v2.py"})
"""Files of other projects that a comment names as its source."""

MENTION = re.compile(r"(?<![\w.*-])(?:[\w.-]+/)*\w+\.py\b(?![*{])")
DOTTED = re.compile(r"\bpenstock\.(?:\w+\.)*\w+")


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=\.) ", " ".join(docstring.split("\n\n")[0].split()))[0]


def test_first_five_minutes_are_short_and_name_both_layers() -> None:
    part = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## The first five minutes\n")[2]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`: \S", part.partition("\n## ")[0], re.MULTILINE)
    assert 0 < len(files) <= 8
    assert {file.partition("/")[0] for file in files} == {"server", "engine"}


def test_every_package_states_its_purpose() -> None:
    missing = [path for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py") if not first_sentence(path)]
    assert not missing


def test_the_order_is_that_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {c["id"]: c["layers"] for c in contracts if c["type"] == "layers"}
    drawn = dict(re.findall(r"<!-- order: ([\w-]+) -->\n```\n(.*?)```", STRUCTURE, re.DOTALL))
    assert set(drawn) == {"engine-packages", "server-packages"}
    for name, picture in drawn.items():
        assert [re.split(r"\s{2,}", line.strip())[0] for line in picture.splitlines()] == layers[name], name


def tracked(*suffixes: str) -> list[Path]:
    """The files of the checkout that somebody wrote; with suffixes, those with one of them."""
    folders = (*LAYERS, "benchmarks", "docker", "docs", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    wanted = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in wanted if not suffixes or path.name.endswith(suffixes))


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Docstrings and comments of a module; the lines of anything else. Each with its line number."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    texts = [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return comments + [(docstring.lineno, str(docstring.value)) for docstring in texts]


def wrong_mentions(paths: list[Path], pattern: re.Pattern[str], is_there: Callable[[str], bool]) -> list[str]:
    """What prose mentions that is not there. Few files mention such a thing at all: only their prose is looked for."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {mention}"
        for path in paths
        if not all(map(is_there, pattern.findall(path.read_text("utf-8"))))
        for line, text in prose(path)
        for mention in pattern.findall(text)
        if not is_there(mention)
    ]


def test_every_file_that_prose_names_exists() -> None:
    """A file in a docstring, a comment or a document is one of that name; with folders, one whose path ends so."""
    paths = {str(path.relative_to(ROOT)) for path in tracked(".py")}
    names = {Path(path).name for path in paths} | OF_OTHER_PROJECTS

    @cache
    def is_there(mention: str) -> bool:
        # usr/: as the checkout's file is called inside the image.
        known = mention in names or any(f"/{path}".endswith(f"/{mention}") for path in paths)
        return known or mention.startswith("usr/")

    files = tracked(".py", ".md", ".yaml", ".yml", ".toml", "Makefile", "Dockerfile")
    wrong = wrong_mentions(files, MENTION, is_there)
    assert not wrong, "\n".join(wrong)


def test_every_dotted_name_in_prose_exists() -> None:
    """A dotted name that begins with `penstock` and a layer is a module, or a name in one."""
    files = tracked(".py", ".md", ".yaml", ".toml", "Makefile", "Dockerfile")
    wrong = wrong_mentions(files, DOTTED, is_elsewhere_or_resolves)
    assert not wrong, "\n".join(wrong)


@cache
def is_elsewhere_or_resolves(name: str) -> bool:
    names = name.split(".")[1:]
    return names[0] not in LAYERS or resolves(names)


def resolves(names: list[str]) -> bool:
    """Whether dotted names lead from the root to a module, or to a name that a module holds."""
    place = ROOT
    for index, name in enumerate(names):
        if (place / name).is_dir():
            place /= name
            continue
        module = place / f"{name}.py"
        rest = names[index + 1 :] if module.is_file() else names[index:]
        text = (module if module.is_file() else place / "__init__.py").read_text("utf-8")
        return len(rest) < 2 and all(re.search(rf"\b{word}\b", text) for word in rest)
    return True
