"""Commands, flags, variables, targets, links, imports and metrics in documents exist."""

import contextlib
import importlib
import io
import operator
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from penstock.engine.families.registry import FAMILIES
from penstock.server.cluster.ray_settings import UNSUPPORTED, RayEmbedSettings, RayServeSettings
from penstock.server.commands.cli import _parser, main
from penstock.server.commands.flags import translate_vllm_flags
from penstock.server.commands.known_models import find_models
from penstock.server.settings import (
    BenchSettings,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    ServerSettings,
    declared_settings,
    environment_variable,
    flag_of,
)

from .tables import cases

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = ROOT / "CHANGELOG.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMMANDS = ("serve", "embed", "eval", "info", "models", "bench", "ray serve", "ray embed")
SETTINGS = (
    ServerSettings,
    EmbedSettings,
    EvalSettings,
    InfoSettings,
    BenchSettings,
    RayServeSettings,
    RayEmbedSettings,
)
OTHER_FLAGS = {
    "build": {"--sdist"},
    "pip": {"--index-url", "--no-deps"},
    "docker": {"--build-arg", "--gpus", "--platform", "--profile", "--stop-timeout", "--target", "--volume"},
    "helm": {"--values"},
    "make test-schema": {"--seed"},
    "ray start": {"--head"},
    "benchmarks": {
        *("--cache", "--data", "--expect", "--help", "--model", "--output", "--peers", "--rounds", "--seconds"),
        *("--against", "--clock", "--device", "--folder", "--loads", "--longest", "--models", "--only", "--phases"),
        *("--server", "--tiny"),
    },
    "mypy": {"--strict"},
}
"""Flags that are no settings."""

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def text_of(document: Path) -> str:
    return document.read_text("utf-8")


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags in the --help of a command."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as done:
        main([*command.split(), "--help"])
    assert done.value.code == 0
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown.getvalue().replace("-\n", "-")))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    assert f"penstock {command}" in text_of(ROOT / "README.md")
    assert flags_of(command) & {"--model", "--revision", "--task"}


@documents
def test_flags_exist(document: Path) -> None:
    known = frozenset().union(*map(flags_of, COMMANDS), *OTHER_FLAGS.values())
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text_of(document)))
    assert not shown - known


def test_every_flag_is_documented() -> None:
    documented = "".join(text_of(document) for document in DOCUMENTS if document != CHANGELOG)
    flags = {flag_of(name) for settings in SETTINGS for name in declared_settings(settings)} - {"--model"}
    missing = [
        flag
        for flag in sorted(flags)
        if not re.search(rf"{flag}(?![\w-])", documented) and f"--no-{flag[2:]}" not in documented
    ]
    assert not missing


@documents
def test_variables_exist(document: Path) -> None:
    known = {environment_variable(name) for settings in SETTINGS for name in declared_settings(settings)}
    known |= {"PENSTOCK_TEST_MODELS", "PENSTOCK_PUBLISHED_PORT"}
    assert not set(re.findall(r"PENSTOCK_\w+", text_of(document))) - known


@pytest.mark.parametrize("document", [*DOCUMENTS, *WORKFLOWS], ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    makefile = text_of(ROOT / "Makefile")
    for target in re.findall(r"(?:^    |`|run: )make\s+([a-z0-9-]+)", text_of(document), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *sorted((ROOT / "kernels").rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_have_targets(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.+)$", text_of(target), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize(("name", "line"), [("llms.txt", r"- \[.+\]\((\S+)\): .+\."), ("mkdocs.yml", r" +- (\S+\.md)")])
def test_every_document_is_listed_once(name: str, line: str) -> None:
    listed = re.findall(f"^{line}$", text_of(ROOT / name), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS)


@documents
def test_penstock_commands_parse(document: Path) -> None:
    text = re.sub(r"\\\n\s*", "", text_of(document))
    for line in re.findall(r"^    (penstock [^\n>|]*)", text, re.MULTILINE):
        words, _ = translate_vllm_flags(shlex.split(line, comments=True)[1:])
        assert _parser().parse_args(words).run, line


def test_support_matrix_has_every_family() -> None:
    section = text_of(ROOT / "docs" / "support.md").split("## Families and devices")[1].split("##")[0]
    rows = re.findall(r"^\| (`.+?) \| (\S+) \|", section, re.MULTILINE)
    levels = {family: level for families, level in rows for family in re.findall(r"`(.+?)`", families)}
    assert sorted(levels) == sorted(FAMILIES)
    tested = {model.family for model in find_models() if model.tested == "weights"}
    assert {family for family, level in levels.items() if level == "real"} == tested


def test_metrics_exist() -> None:
    known = set(re.findall(r"^\| `(penstock_\w+)`", text_of(ROOT / "docs" / "reference" / "metrics.md"), re.MULTILINE))
    for document in DOCUMENTS:
        if document != CHANGELOG:
            assert not set(re.findall(r"`(penstock_\w+)`", text_of(document))) - known, document.name


WORDS = {1: "one", 2: "two", 3: "three", 5: "five", 8: "eight", 10: "ten"}
SIZES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "mb": 10**6, "ms": 0.001, "days": 86_400}


@cases(__file__, "page", "module", "name", "text")
def test_documented_limit_is_that_of_the_code(page: str, module: str, name: str, text: str) -> None:
    package = "penstock" if module.startswith("engine.") else "penstock.server"
    value = operator.attrgetter(name)(importlib.import_module(f"{package}.{module}"))
    sizes = {unit: f"{value / size:g}" for unit, size in SIZES.items()}
    written = {"word": 1, "minutes": 60, "hours": 3600}
    sizes |= {unit: WORDS.get(value / size, "?") for unit, size in written.items()}
    words = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert text.format(value, **sizes) in words


def test_ray_page_names_the_unsupported_flags() -> None:
    text = text_of(ROOT / "docs" / "ray.md")
    assert not [name for name in UNSUPPORTED if f"`{flag_of(name)}`" not in text]
