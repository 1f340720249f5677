"""The documents name what is there: rooms, files, functions, the order of imports; and the walks stay short.

A hop of a walk in docs/structure.md is a numbered line: the file, then one or more names in it, each in backticks, then
a colon and what happens there. The comment before a walk says how many files it may have, outside models and kernels.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("server", "engine", "kernels")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text("utf-8")
NOT_COUNTED = ("engine/models/", "engine/layers/", "kernels/")
"""A walk passes through the model; which of its files those are differs from family to family."""
OF_OTHER_PROJECTS = frozenset({"modules/pooling.py", "mxbai_rerank_v2.py"})
"""Files of other projects that a comment names as its source."""

HOP = re.compile(r"^\d+\. `(?P<path>[\w/.]+\.py)` (?P<names>`[\w.]+`(?:, `[\w.]+`)*): \S")
ROOM = re.compile(r"^- `(?P<path>[\w/]+)/`: (?P<sentence>.+)$", re.MULTILINE)
MENTION = re.compile(r"(?<![\w.*-])(?:[\w.-]+/)*\w+\.py\b(?![*{])")
DOTTED = re.compile(r"\bpenstock\.(?:\w+\.)*\w+")


class Walk(NamedTuple):
    """One walk through the rooms."""

    name: str
    max_num_files: int
    hops: list[tuple[str, list[str]]]


def walks() -> list[Walk]:
    found = []
    parts = re.split(r"<!-- walk: (\w+), at most (\d+) files -->\n", STRUCTURE)[1:]
    for name, limit, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        hops = []
        for line in text.partition("\n\n")[0].splitlines():
            hop = HOP.match(line)
            assert hop is not None, f"this is no hop: {line}"
            hops.append((hop["path"], re.findall(r"`([\w.]+)`", hop["names"])))
        found.append(Walk(name, int(limit), hops))
    return found


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names of the classes and functions of a module; those of a class as Class.name."""

    def of(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from of(node.body, f"{prefix}{node.name}.")

    return frozenset(of(ast.parse(path.read_text("utf-8")).body, ""))


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"(?<=\.) ", " ".join(docstring.split("\n\n")[0].split()))[0]


def test_the_walks_are_there() -> None:
    assert {walk.name: walk.max_num_files for walk in walks()} == {"request": 28, "chunk": 14}


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.name)
def test_every_hop_exists(walk: Walk) -> None:
    for path, names in walk.hops:
        assert (ROOT / path).is_file(), path
        missing = [name for name in names if name not in definitions(ROOT / path)]
        assert not missing, f"{path} has no {', '.join(missing)}"


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk.name)
def test_the_walks_are_short_and_in_order(walk: Walk) -> None:
    files = {path for path, _ in walk.hops if not path.startswith(NOT_COUNTED)}
    assert len(files) <= walk.max_num_files, sorted(files)
    text = STRUCTURE.partition(f"<!-- walk: {walk.name},")[2].partition("\n\n")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\.", text, re.MULTILINE)]
    assert numbers == list(range(1, len(walk.hops) + 1))


def test_the_first_five_minutes_are_short_and_name_both_layers() -> None:
    part = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## The first five minutes\n")[2]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`: \S", part.partition("\n## ")[0], re.MULTILINE)
    assert 0 < len(files) <= 8
    assert {file.partition("/")[0] for file in files} == {"server", "engine"}


def test_every_room_is_listed_with_its_sentence() -> None:
    rooms = {
        str(path.parent.relative_to(ROOT)): first_sentence(path)
        for layer in LAYERS
        for path in (ROOT / layer).rglob("__init__.py")
    }
    listed = {room["path"]: room["sentence"] for room in ROOM.finditer(STRUCTURE)}
    assert sorted(listed) == sorted(rooms)
    for room, sentence in rooms.items():
        assert sentence, f"{room}/__init__.py has no docstring"
        assert listed[room].startswith(sentence), f"- `{room}/`: {sentence}"


def test_the_readme_has_a_line_for_every_room() -> None:
    shown = (ROOT / "README.md").read_text("utf-8").partition("## Rooms\n")[2].partition("\n## ")[0]
    for layer in LAYERS:
        rooms = [path.parent.name for path in (ROOT / layer).glob("*/__init__.py")]
        part = shown.partition(f"    {layer}/ ")[2]
        part = re.split(r"^    \w", part, maxsplit=1, flags=re.MULTILINE)[0]
        if layer == "kernels":
            assert sorted(part.partition("operation: ")[2].replace(",", "").split()) == sorted(rooms)
        else:
            assert sorted(re.findall(r"^      (\w+)/ ", part, re.MULTILINE)) == sorted(rooms)


def test_the_order_is_that_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {c["id"]: c["layers"] for c in contracts if c["type"] == "layers"}
    drawn = dict(re.findall(r"<!-- order: ([\w-]+) -->\n```\n(.*?)```", STRUCTURE, re.DOTALL))
    assert set(drawn) == {"engine-rooms", "server-rooms"}
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
