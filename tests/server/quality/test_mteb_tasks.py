"""Calls from and to MTEB, with a stand-in for its package: `make test-mteb` runs the real one."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.server.quality.evaluate import MtebEncoder, find_tasks, run_tasks
from penstock.server.settings import CommandError, UsageError

from ...tables import cases

LOADER = [{"text": ["a", "b"]}, {"text": ["c"]}]


class Client:
    """An EvalClient whose vectors are the number of the text in its call."""

    model, dimensions, texts_per_request = "served", 1, 7

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], str]] = []

    def embed(self, texts: list[str], input_type: str) -> np.ndarray:
        self.calls.append((texts, input_type))
        return np.arange(len(texts), dtype=np.float32)[:, None]


def task(kind: str, modalities: tuple[str, ...] = ("text",)) -> Any:
    metadata = SimpleNamespace(name=kind, type=kind, main_score="score", modalities=modalities)
    return SimpleNamespace(metadata=metadata, load_data=lambda: None)


@pytest.fixture
def mteb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `mteb` that scores a task with the mean of its vectors. `mteb.options` records arguments."""
    module: Any = ModuleType("mteb")
    module.options = []

    def evaluate(encoder: MtebEncoder, task: Any, **options: object) -> Any:
        module.options.append(options)
        score = float(encoder.encode(LOADER, task_metadata=task.metadata, batch_size=7).mean()) / 3
        scores = {"test": [{"hf_subset": "en", "main_score": score}, {"hf_subset": "de", "main_score": 0.5}]}
        return SimpleNamespace(task_results=[SimpleNamespace(scores=scores, get_score=lambda: score)])

    module.evaluate = evaluate
    module.get_task = {"STS": task("STS"), "Pictures": task("Pictures", ("image", "text"))}.__getitem__
    monkeypatch.setitem(sys.modules, "mteb", module)
    return module


@cases(__file__, "kind", "prompt_type", "input_type")
def test_task_selects_the_prompt_of_all_batches(kind: str, prompt_type: str | None, input_type: str) -> None:
    client = Client()
    purpose = prompt_type and SimpleNamespace(value=prompt_type)
    vectors = MtebEncoder(client).encode(LOADER, task_metadata=task(kind).metadata, prompt_type=purpose)  # type: ignore[arg-type]
    assert vectors.tolist() == [[0], [1], [2]]
    assert client.calls == [(["a", "b", "c"], input_type)]


def test_report_has_the_scores_of_each_split(mteb: Any) -> None:
    client = Client()
    first, second = run_tasks([task("STS"), task("Clustering")], client)  # type: ignore[arg-type]
    rows = {"en": 0.33333, "de": 0.5}
    expected = {"model": "served", "dimensions": 1, "scores": {"score": 0.33333}, "splits": {"test": rows}}
    assert first == {"data": "STS", "task": "STS", **expected}
    assert second == {"data": "Clustering", "task": "Clustering", **expected}
    assert [input_type for _, input_type in client.calls] == ["similarity", "clustering"]
    quiet = {"cache": None, "show_progress_bar": False, "co2_tracker": False}
    assert mteb.options == [{"encode_kwargs": {"batch_size": 7, "show_progress_bar": False}, **quiet}] * 2


def test_vectors_are_compared_by_their_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb.models.model_meta", meta := Mock())
    monkeypatch.setitem(sys.modules, "mteb.similarity_functions", functions := Mock())
    encoder = MtebEncoder(Client())  # type: ignore[arg-type]
    assert encoder.mteb_model_meta is meta.ModelMeta.create_empty.return_value
    known = {"name": "served", "similarity_fn_name": meta.ScoringFunction.COSINE}
    meta.ModelMeta.create_empty.assert_called_once_with(overwrites=known)
    assert encoder.similarity(np.eye(1), np.eye(1)) is functions.cos_sim.return_value
    assert encoder.similarity_pairwise(np.eye(1), np.eye(1)) is functions.pairwise_cos_sim.return_value


def test_data_that_cannot_be_loaded_are_named(mteb: Any) -> None:
    def fail() -> None:
        raise OSError("no network\nmore")

    lost = task("STS")
    lost.load_data = fail
    with pytest.raises(CommandError, match=r"^--mteb: the data of STS cannot be loaded .*: no network$"):
        list(run_tasks([lost], Client()))  # type: ignore[arg-type]


def test_tasks_are_found_by_name(mteb: Any) -> None:
    assert [found.metadata.name for found in find_tasks(["STS"])] == ["STS"]
    with pytest.raises(UsageError, match=r"^--mteb: Nothing \(got 'Nothing'\)"):
        find_tasks(["STS", "Nothing"])
    with pytest.raises(UsageError, match=r"^--mteb: Pictures needs image, text, but penstock embeds text$"):
        find_tasks(["Pictures"])
