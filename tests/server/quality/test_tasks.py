"""Data sets in folders, and their scores."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.server.quality.tasks import (
    DRAWS,
    EXAMPLES,
    ClassificationTask,
    RetrievalTask,
    SimilarityTask,
    draw_examples,
    read_task,
    spearman,
    top_ids,
)
from penstock.server.settings import UsageError

from ...tables import cases, table

Write = Callable[..., Path]
RETRIEVAL = table(__file__, "retrieval")
STS = "sentence1\tsentence2\tscore\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the files of a folder."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text, errors="surrogateescape")
        return tmp_path

    return write


def test_retrieval_folder_has_judged_queries_and_scores(write: Write) -> None:
    task = read_task(write(RETRIEVAL))
    assert isinstance(task, RetrievalTask)
    assert task.corpus == {"1": "A dam", "2": "song", "3": "x"}
    assert task.queries == {"q": "wall"}
    vectors = {"wall": (1, 0), "song": (5, 0), "A dam": (2, 1), "x": (0, 1)}

    def embed(texts: Sequence[str], _: str) -> np.ndarray:
        return np.array([vectors[text] for text in texts], np.float32)

    assert task.search(embed) == {"q": ["2", "1", "3"]}
    assert task.search(embed, 2) == {"q": ["2", "1"]}
    many = RetrievalTask(task.corpus, dict.fromkeys(map(str, range(40)), "wall"), {})
    assert many.search(embed) == {query: ["2", "1", "3"] for query in many.queries}
    # gains 0, 2, 1; the ideal order has 2, 1
    ndcg = (2 / np.log2(3) + 1 / 2) / (2 + 1 / np.log2(3))
    scores = task.scores({"q": ["2", "1", "3"]})
    assert list(scores.values()) == pytest.approx([ndcg, (1 / 2 + 2 / 3) / 2, 1, 1, 1 / 2])
    late = [f"other {number}" for number in range(10)] + ["1"]
    assert list(task.scores({"q": late}).values()) == [0, 0, 0, 0.5, 0]


def test_title_may_be_null(write: Write) -> None:
    folder = write({**RETRIEVAL, "corpus.jsonl": '{"_id": "1", "title": null, "text": "t"}'})
    assert RetrievalTask.read(folder).corpus == {"1": "t"}


def test_scores_are_means_over_queries_of_relevant_documents(write: Write) -> None:
    """Negative judgements count as not relevant, and 100 documents are read for recall_at_100."""
    queries = '{"_id": "q", "text": "a"}\n{"_id": "r", "text": "b"}'
    judgements = "query-id\tcorpus-id\tscore\nq\t1\t1\nq\t2\t-1\nr\t3\t1\n"
    task = RetrievalTask.read(write({**RETRIEVAL, "queries.jsonl": queries, "qrels/test.tsv": judgements}))
    far = [f"other {number}" for number in range(99)]
    scores = task.scores({"q": ["2", "1"], "r": [*far, "3"]})
    assert list(scores.values()) == pytest.approx([1 / np.log2(3) / 2, 1 / 4, 1 / 2, 1, 1 / 4])
    assert task.scores({"q": ["1"], "r": [*far, "x", "3"]})["recall_at_100"] == 1 / 2
    dozen = [str(number) for number in range(12)]  # all relevant; query q has no relevant document
    task = RetrievalTask({}, {"q": "a", "r": "b"}, {"q": {"0": -1.0}, "r": dict.fromkeys(dozen, 1.0)})
    scores = task.scores({"q": dozen, "r": dozen})
    assert list(scores.values()) == pytest.approx([1 / 2, 10 / 12 / 2, 10 / 12 / 2, 1 / 2, 1 / 2])


def test_reranker_sorts_only_the_first_documents(write: Write) -> None:
    task = RetrievalTask.read(write(RETRIEVAL))

    def rerank(requests: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
        assert requests == [("wall", ["song", "A dam"])]
        return [np.array([0.1, 0.9])]

    assert task.rerank({"q": ["2", "1", "3"]}, rerank, 2) == {"q": ["1", "2", "3"]}


def test_equal_scores_are_sorted_by_larger_id() -> None:
    assert top_ids(np.array([0.5, 0.5, 0.1, 0.5]), ["a", "c", "d", "b"], 2) == ["c", "b"]


def test_spearman_equals_pearson_of_mean_ranks() -> None:
    left, right = np.array([1.0, 2, 2, 9, 3]), np.array([10.0, 30, 20, 40, 40])
    expected = np.corrcoef([1, 2.5, 2.5, 5, 4], [1, 3, 2, 4.5, 4.5])[0, 1]
    assert spearman(left, right) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(spearman(left, np.ones(5)))


def test_similarity_cells_keep_quotation_marks(write: Write) -> None:
    task = read_task(write({"test.tsv": STS + 'a "b\tc\t1\nd\te\t0.5\n'}))
    assert isinstance(task, SimilarityTask)
    assert (task.pairs, task.similarities) == ([('a "b', "c"), ("d", "e")], [1, 0.5])


def test_similarity_scores_compare_cosines_with_judgements(write: Write) -> None:
    rows = (("a", "b", 3), ("a", "c", 2), ("a", "d", 1), ("a", "0", 1.5))
    lines = "".join(
        f'{{"sentence1": "{left}", "sentence2": "{right}", "score": {score}}}\n' for left, right, score in rows
    )
    task = read_task(write({"test.jsonl": lines}))
    assert isinstance(task, SimilarityTask)
    vectors = {"a": (2, 0), "b": (9, 1), "c": (1, 1), "d": (0, 1), "0": (0, 0)}

    def embed(texts: Sequence[str], input_type: str) -> np.ndarray:
        assert input_type == "similarity"
        return np.array([vectors[text] for text in texts], np.float32)

    # cosines: the last two are 0 and share rank 1.5
    assert task.scores(embed)["spearman"] == pytest.approx(spearman(np.array([4, 3, 1, 1]), np.array([3, 2, 1, 1.5])))


def test_draws_take_some_examples_of_each_class() -> None:
    classes = ["a"] * 20 + ["b"] * 5
    draws = list(draw_examples(classes))
    assert len(draws) == DRAWS == len({tuple(each) for each in map(np.ndarray.tolist, draws)})
    for indices in draws:
        assert [sum(classes[index] == name for index in set(indices)) for name in "ab"] == [EXAMPLES, 5]
    assert all(map(np.array_equal, draws, draw_examples(classes)))
    assert draws[0][:4].tolist() == [15, 16, 19, 20]  # the same in every version


def test_separable_classes_are_classified_without_error(write: Write) -> None:
    rows = "".join(f"{word} {number},{word}\n" for word in ("song", "dam") for number in range(12))
    task = read_task(write({"train.csv": "text,category\n" + rows, "test.csv": "text,category\n" + rows}))
    assert isinstance(task, ClassificationTask)
    assert task.scores(lambda texts, _: np.array([(text[0] == "s", text[0] == "d") for text in texts])) == {
        "accuracy": 1
    }


@cases(__file__, "files", "message")
def test_wrong_folder_is_rejected_with_file_and_line(files: dict[str, str | None], message: str, write: Write) -> None:
    wanted = {**RETRIEVAL, **files} if files else {}
    folder = write({name: text for name, text in wanted.items() if text is not None})
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        read_task(folder)
