"""The models that `penstock models` lists, from known_models.toml, as text, as JSON and as a page of the documents."""

from __future__ import annotations

import dataclasses
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from penstock.engine.protocol.setting import short_count

Task = Literal["embed", "rerank", "classify", "sparse", "multi_vector"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A published model. known_models.toml describes the fields."""

    name: str
    tasks: tuple[Task, ...]
    family: str
    num_parameters: int
    dimensions: int | None = None
    max_tokens: int
    languages: str = "English"
    licence: str
    tested: Literal["weights", "architecture"] = "architecture"
    note: str = ""

    @property
    def command(self) -> str:
        """The command that serves it."""
        return f"penstock serve {self.name}"

    def contains(self, word: str) -> bool:
        """Whether a fact contains a word, in upper or lower case."""
        facts = (self.name, self.family, *self.tasks, self.languages, self.licence, self.note)
        return any(word.lower() in fact.lower() for fact in facts)


_HEADS: Final = "task", "parameters", "dimensions", "max tokens", "languages", "licence", "family", "tested", "command"
_TESTED: Final = """\
tested: "weights" means that the tests run the published weights. "architecture" means that the tests compare small \
random weights of the same architecture with transformers or sentence-transformers, but not the published weights."""
_PAGE_HEAD: Final = """\
# List of models

`penstock models` prints this list; `--task rerank` and a search word (`penstock models multilingual`) select models,
`--json` prints JSON. penstock also serves models that are not listed:
[which models run](../models.md#which-models-run). This page is generated from `server/commands/known_models.toml` by
`make reference`.

"""


def find_models(task: Task | None = None, word: str = "") -> list[KnownModel]:
    """Returns the models for a task (None: all tasks) with a word in their facts.

    Models with `task` as their main task come first.
    """
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        entries = tomllib.load(file)["models"]
    models = [KnownModel(**{**entry, "tasks": tuple(entry["tasks"])}) for entry in entries]
    found = [model for model in models if (task is None or task in model.tasks) and model.contains(word)]
    return sorted(found, key=lambda model: task is not None and model.tasks[0] != task)


def as_json(models: Sequence[KnownModel]) -> list[dict[str, object]]:
    """Returns models as JSON values."""
    return [{**dataclasses.asdict(model), "command": model.command} for model in models]


def as_text(models: Sequence[KnownModel], width: int) -> str:
    """Returns models as a table, or as paragraphs if the table is wider than `width` columns."""
    if not models:
        return "No listed model matches. penstock also serves models that are not listed."
    lines = _table(models)
    if max(map(len, lines)) > width:
        lines = [_paragraph(model, width) for model in models]
    return "\n".join([*lines, "", textwrap.fill(_TESTED, min(width, 120))])


def _table(models: Sequence[KnownModel]) -> list[str]:
    rows = [_HEADS, *map(_cells, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [[], *([f"    {model.note}"] if model.note else [] for model in models)]
    return [text for line, note in zip(lines, notes, strict=True) for text in (line, *note)]


def _cells(model: KnownModel) -> tuple[str, ...]:
    return (
        ", ".join(model.tasks),
        short_count(model.num_parameters),
        str(model.dimensions or "-"),
        str(model.max_tokens),
        model.languages,
        model.licence,
        model.family,
        model.tested,
        model.command,
    )


def _paragraph(model: KnownModel, width: int) -> str:
    tasks, parameters, dimensions, max_tokens, languages, licence, family, tested, command = _cells(model)
    facts = [
        tasks,
        f"{parameters} parameters",
        *([f"{dimensions} dimensions"] if model.dimensions else []),
        f"{max_tokens} tokens",
        *(f"languages: {languages}", licence, f"family {family}", f"tested: {tested}"),
        *([model.note] if model.note else []),
    ]
    return f"{command}\n{textwrap.fill('; '.join(facts), width, initial_indent='    ', subsequent_indent='    ')}"


def models_page() -> str:
    """Returns docs/reference/models.md."""
    heads = ("model", *_HEADS[:-1], "note")
    rows = [heads, ["---"] * len(heads)]
    rows += [(f"`{model.name}`", *_cells(model)[:-1], model.note) for model in find_models()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{_PAGE_HEAD}{textwrap.fill(_TESTED, 120)}\n\n{table}\n"
