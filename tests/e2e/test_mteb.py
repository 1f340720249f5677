"""`penstock eval --mteb` with tasks whose data are in memory: MTEB's own tasks need a hub."""

import numpy as np
import pytest

from penstock.server.quality.evaluate import EvalClient, run_tasks
from penstock.server.settings import EvalSettings
from penstock.server.target_server import TargetServer

from ..servers import Server

mteb = pytest.importorskip("mteb", reason="`make test-mteb` installs mteb")
datasets = pytest.importorskip("datasets")
retrieval_task = pytest.importorskip("mteb.abstasks.retrieval")
sts_task = pytest.importorskip("mteb.abstasks.sts")

TaskMetadata = pytest.importorskip("mteb.abstasks.task_metadata").TaskMetadata
PAIRS = [("A dam.", "A wall in a river.", 4.0), ("A dam.", "A song.", 1.0), ("A cat.", "A cat.", 5.0)]
CORPUS = {"1": "A dam holds back water.", "2": "A song about the sea.", "3": "Bread rises in the oven."}
QUERIES = {"q1": "Which wall holds back water?", "q2": "How does a baker make bread?"}
RELEVANT = {"q1": {"1": 1}, "q2": {"3": 1}}


def metadata(name: str, kind: str, main_score: str) -> object:
    return TaskMetadata(
        name=name,
        dataset={"path": "local/none", "revision": "1"},
        description="A task in memory.",
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
    )


class LocalSTS(sts_task.AbsTaskSTS):
    min_score = 0
    max_score = 5
    metadata = metadata("LocalSTS", "STS", "cosine_spearman")

    def load_data(self, **_: object) -> None:
        first, second, scores = map(list, zip(*PAIRS, strict=True))
        rows = {"sentence1": first, "sentence2": second, "score": scores}
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
        self.data_loaded = True


class LocalRetrieval(retrieval_task.AbsTaskRetrieval):
    metadata = metadata("LocalRetrieval", "Retrieval", "ndcg_at_10")

    def load_data(self, **_: object) -> None:
        def table(texts: dict[str, str]) -> object:
            return datasets.Dataset.from_dict({"id": list(texts), "text": list(texts.values())})

        split = {"corpus": table(CORPUS), "queries": table(QUERIES), "relevant_docs": RELEVANT, "top_ranked": None}
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


@pytest.fixture
def client(server: Server) -> EvalClient:
    settings = EvalSettings(texts_per_request=2)
    return EvalClient(TargetServer(server.url, settings), settings)


def test_scores_are_those_of_the_served_vectors(client: EvalClient) -> None:
    first, second = (client.embed(list(texts), "similarity") for texts in list(zip(*PAIRS, strict=True))[:2])
    cosines = (first * second).sum(1)
    assert cosines.argsort().tolist() == np.argsort([score for *_, score in PAIRS]).tolist()
    retrieval, similarity = run_tasks([LocalRetrieval(), LocalSTS()], client)
    shared = {"model": client.model, "dimensions": 384}
    assert similarity == {
        "data": "LocalSTS",
        **shared,
        "task": "STS",
        "scores": {"cosine_spearman": 1.0},
        "splits": {"test": {"default": 1.0}},
    }
    assert retrieval == {
        "data": "LocalRetrieval",
        **shared,
        "task": "Retrieval",
        "scores": {"ndcg_at_10": 1.0},
        "splits": {"test": {"default": 1.0}},
    }
