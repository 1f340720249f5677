"""The models that `penstock models` lists.

A model is listed if penstock implements its architecture and the tests compare it with transformers or
sentence-transformers. `tested` states the tested weights: published weights, or small random weights. Sizes,
languages and licences are from the model cards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal, get_args

from ..models.weight_files import short_count

Task = Literal["embed", "rerank", "classify", "sparse", "multi_vector"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A published model.

    Attributes:
        name: Hub id.
        tasks: Its tasks, the main one first.
        family: model_type of its config.json.
        num_parameters: As published, for some models in round millions.
        dimensions: Size of a dense vector or of each token vector; None for scores and sparse vectors.
        languages: Its languages.
        licence: SPDX id of its licence.
        tested: The weights in the tests of this project.
        note: A remark; may be empty.
    """

    name: str
    tasks: tuple[Task, ...]
    family: str
    num_parameters: int
    dimensions: int | None = None
    languages: str = "English"
    licence: str = "Apache-2.0"
    tested: Literal["weights", "architecture"] = "architecture"
    note: str = ""

    @property
    def command(self) -> str:
        """The command that serves it."""
        return f"penstock serve {self.name}"


_MANY: Final = "100 and more"
KNOWN_MODELS: Final = (
    KnownModel(
        name="sentence-transformers/all-MiniLM-L6-v2",
        tasks=("embed",),
        family="bert",
        num_parameters=22_713_216,
        dimensions=384,
        tested="weights",
        note="the default of `penstock serve`; needs no hub",
    ),
    KnownModel(
        name="BAAI/bge-small-en-v1.5",
        tasks=("embed",),
        family="bert",
        num_parameters=33_400_000,
        dimensions=384,
        licence="MIT",
    ),
    KnownModel(
        name="sentence-transformers/all-mpnet-base-v2",
        tasks=("embed",),
        family="mpnet",
        num_parameters=109_486_464,
        dimensions=768,
    ),
    KnownModel(
        name="intfloat/multilingual-e5-small",
        tasks=("embed",),
        family="bert",
        num_parameters=118_000_000,
        dimensions=384,
        languages="about 100",
        licence="MIT",
        note='put "query: " or "passage: " before every text',
    ),
    KnownModel(
        name="nomic-ai/nomic-embed-text-v1.5",
        tasks=("embed",),
        family="nomic_bert",
        num_parameters=136_731_648,
        dimensions=768,
        note='put "search_query: " or "search_document: " before every text; needs no --trust-remote-code',
    ),
    KnownModel(
        name="Alibaba-NLP/gte-base-en-v1.5",
        tasks=("embed",),
        family="new",
        num_parameters=136_776_192,
        dimensions=768,
        note="needs no --trust-remote-code",
    ),
    KnownModel(
        name="mixedbread-ai/mxbai-rerank-base-v1",
        tasks=("rerank",),
        family="deberta-v2",
        num_parameters=184_000_000,
    ),
    KnownModel(
        name="jinaai/jina-embeddings-v2-base-en",
        tasks=("embed",),
        family="bert",
        num_parameters=137_000_000,
        dimensions=768,
        note="needs no --trust-remote-code",
    ),
    KnownModel(
        name="Alibaba-NLP/gte-modernbert-base",
        tasks=("embed",),
        family="modernbert",
        num_parameters=149_014_272,
        dimensions=768,
    ),
    KnownModel(
        name="mixedbread-ai/mxbai-embed-large-v1",
        tasks=("embed",),
        family="bert",
        num_parameters=335_141_888,
        dimensions=1024,
    ),
    KnownModel(
        name="BAAI/bge-m3",
        tasks=("embed", "sparse", "multi_vector"),
        family="xlm-roberta",
        num_parameters=568_000_000,
        dimensions=1024,
        languages=_MANY,
        licence="MIT",
        note="three kinds of vectors from one forward (/v1/encode)",
    ),
    KnownModel(
        name="Qwen/Qwen3-Embedding-0.6B",
        tasks=("embed",),
        family="qwen3",
        num_parameters=595_776_512,
        dimensions=1024,
        languages=_MANY,
        note="long inputs run in chunks",
    ),
    KnownModel(
        name="cross-encoder/ms-marco-MiniLM-L6-v2",
        tasks=("rerank",),
        family="bert",
        num_parameters=22_713_601,
    ),
    KnownModel(
        name="mixedbread-ai/mxbai-rerank-base-v2",
        tasks=("rerank",),
        family="qwen2",
        num_parameters=494_032_768,
        languages=_MANY,
        note="its prompt and its answer tokens are known",
    ),
    KnownModel(
        name="BAAI/bge-reranker-v2-m3",
        tasks=("rerank",),
        family="xlm-roberta",
        num_parameters=568_000_000,
        languages="multilingual",
    ),
    KnownModel(
        name="Qwen/Qwen3-Reranker-0.6B",
        tasks=("rerank",),
        family="qwen3",
        num_parameters=595_776_512,
        languages=_MANY,
        note="its prompt and its answer tokens are known",
    ),
    KnownModel(
        name="distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        tasks=("classify",),
        family="distilbert",
        num_parameters=66_955_010,
        note="two classes: POSITIVE and NEGATIVE",
    ),
    KnownModel(
        name="ibm-granite/granite-embedding-30m-sparse",
        tasks=("sparse",),
        family="roberta",
        num_parameters=30_300_000,
    ),
    KnownModel(
        name="lightonai/GTE-ModernColBERT-v1",
        tasks=("multi_vector",),
        family="modernbert",
        num_parameters=149_015_808,
        dimensions=128,
        note="late interaction: rerank and score compare token by token",
    ),
)
_TESTED: Final = """\
tested: "weights" means that the tests run the published weights. "architecture" means that the tests compare small
random weights of the same architecture with transformers or sentence-transformers, but not the published weights."""


def models_for(task: Task | None) -> list[KnownModel]:
    """Returns the models for a task (None: all models), sorted so that models with this main task come first."""
    found = [model for model in KNOWN_MODELS if task is None or task in model.tasks]
    return sorted(found, key=lambda model: task is not None and model.tasks[0] != task)


def as_json(models: Sequence[KnownModel]) -> list[dict[str, object]]:
    """Returns models as JSON values."""
    return [{**dataclasses.asdict(model), "command": model.command} for model in models]


def as_table(models: Sequence[KnownModel]) -> str:
    """Returns models as a text table."""
    heads = ("task", "parameters", "dimensions", "languages", "licence", "tested", "command")
    rows = [
        (
            ", ".join(model.tasks),
            short_count(model.num_parameters),
            str(model.dimensions or "-"),
            model.languages,
            model.licence,
            model.tested,
            model.command,
        )
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    notes = ["", *(f"\n    {model.note}" if model.note else "" for model in models)]
    return "\n".join([*(line.rstrip() + note for line, note in zip(lines, notes, strict=True)), "", _TESTED])
