"""Scores and classes: the inputs that run, the vectors that are compared, and the token counts."""

from typing import Any

import numpy as np
import pytest

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.scoring import PairScorer, check_labels, few_shot_scores, paired_cosine, zero_shot_scores
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import AdapterSpec, ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams, RequestOptions
from penstock.engine.protocol.results import ScoreResult
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.tokenization.input_encoder import InputEncoder

from ...tables import cases
from .word_model import TABLE, WordCore, ids, info, tokenizer_pool

PROMPTS = {"query": "query: ", "document": "document: "}
MAXSIM = {"tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE), "multi_vector": MultiVector()}
SPARSE_TASKS = {"tasks": (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)}
SPARSE = {**SPARSE_TASKS, "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}
CROSS_ENCODER = {"kind": ModelKind.CROSS_ENCODER, "tasks": (PoolingTask.SCORE,), "labels": ("relevant",)}
DOCUMENTS = ["b c", "a a d", "e"]


async def score(
    left: list[str],
    right: list[str],
    *,
    model: ModelInfo | None = None,
    params: PoolingParams | None = None,
    **options: Any,
) -> tuple[ScoreResult, WordCore]:
    """Scores with a new engine."""
    model = model or info()
    dispatcher = Dispatcher(max_queued_tokens=1_000)
    core = WordCore(dispatcher)
    tokenizer = tokenizer_pool()
    encoder = InputEncoder(model, tokenizer, EngineConfig(model="/words"))
    try:
        scorer = PairScorer(model, encoder, dispatcher)
        return await scorer.score(left, right, params or PoolingParams(), RequestOptions(**options)), core
    finally:
        tokenizer.close()
        assert (dispatcher.stats.num_requests, dispatcher.stats.num_tokens) == (0, 0)


def vector(text: str) -> np.ndarray:
    total = TABLE[ids(text)].sum(axis=0)
    return total / np.linalg.norm(total)


def max_sim(query: str, document: str) -> float:
    return float((TABLE[ids(document)] @ TABLE[ids(query)].T).max(axis=0).sum())


async def test_embedder_scores_by_cosine() -> None:
    result, core = await score(["a b c"], DOCUMENTS)
    assert result.scores == pytest.approx([vector("a b c") @ vector(d) for d in DOCUMENTS], abs=1e-6)
    assert result.num_tokens == [2 + 3, 3, 1]  # the query counts once
    assert core.texts() == [ids("a b c"), *map(ids, DOCUMENTS)]
    assert core.sent[0][0].params.normalize is True
    result, _ = await score(["a", "b b", "c"], DOCUMENTS)
    expected = [vector(q) @ vector(d) for q, d in zip("abc", DOCUMENTS, strict=True)]
    assert result.scores == pytest.approx(expected, abs=1e-6)
    assert result.num_tokens == [3, 5, 2]
    _, core = await score(["a"], ["b"], model=info(normalize=False))
    assert core.sent[0][0].params.normalize is True


@pytest.mark.parametrize(("given", "used"), [(None, -1), (4, 4)])
async def test_passage_with_one_more_token_alone_is_truncated(given: int | None, used: int) -> None:
    _, core = await score(["a"], ["b c"], params=PoolingParams(truncate_prompt_tokens=given), max_passages=3)
    assert {request.params.truncate_prompt_tokens for request, _ in core.sent} == {used}


@cases(__file__, "fields", "message")
async def test_parameters_without_effect_on_scores_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await score(["a"], ["b"], params=PoolingParams(**fields))


@cases(__file__, "model", "options", "query", "document")
async def test_queries_and_documents_get_their_prompts(
    model: dict[str, Any], options: dict[str, Any], query: str, document: str
) -> None:
    _, core = await score(["a"], ["b"], model=info(**model), **options)
    assert core.texts() == [ids(query), ids(document)]
    with pytest.raises(InvalidRequestError, match=r"accepts no instruction"):
        await score(["a"], ["b"], model=info(prompts=PROMPTS), instruction="find ")


@cases(__file__, "left", "right", "message", "param")
async def test_texts_without_a_partner_are_rejected(
    left: list[str], right: list[str], message: str, param: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        await score(left, right)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("labels", "message"), [([], "two different"), (["a", "a"], "two different"), (["a", "b", "a"], "each once")]
)
def test_labels_must_differ(labels: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"candidate_labels must name at least .*{message}") as error:
        check_labels(labels, "candidate_labels")
    assert error.value.param == "candidate_labels"
    check_labels(["a", "b"], "candidate_labels")


@pytest.mark.parametrize(
    ("given", "query", "document"), [(None, "retrieval.query", "retrieval.passage"), ("other", "other", "other")]
)
async def test_sides_run_with_their_task_adapters(given: str | None, query: str, document: str) -> None:
    names = ("retrieval.query", "retrieval.passage", "other")
    adapters = tuple(AdapterSpec(name=name, index=index, is_task=True) for index, name in enumerate(names))
    prompts = {"retrieval.query": "query: ", "retrieval.passage": "document: "}
    _, core = await score(["a"], ["b"], model=info(adapters=adapters, prompts=prompts), adapter=given)
    assert [request.params.adapter for request, _ in core.sent] == list(dict.fromkeys((query, document)))
    prefixes = ("", "") if given else prompts.values()
    found = [tokens for number in range(len(core.sent)) for tokens in core.texts(number)]
    assert found == [ids(prefix + text) for prefix, text in zip(prefixes, "ab", strict=True)]


@pytest.mark.parametrize("averages", [False, True])
async def test_maxsim_scores_sum_or_average_the_best_matches(averages: bool) -> None:
    result, _ = await score(
        ["a b c"], DOCUMENTS, model=info(**{**MAXSIM, "multi_vector": MultiVector(averages=averages)})
    )
    expected = [max_sim("a b c", document) / (3 if averages else 1) for document in DOCUMENTS]
    assert result.scores == pytest.approx(expected, abs=1e-5)
    assert result.num_tokens == [2 + 3, 3, 1]


async def test_repeated_late_query_runs_and_counts_once() -> None:
    result, core = await score(["a b", "c", "a b"], DOCUMENTS, model=info(**MAXSIM, prompts=PROMPTS))
    queries, documents = ["query: a b", "query: c", "query: a b"], [f"document: {d}" for d in DOCUMENTS]
    expected = [max_sim(q, d) for q, d in zip(queries, documents, strict=True)]
    assert result.scores == pytest.approx(expected, abs=1e-5)
    assert result.num_tokens == [3 + 3, 4 + 2, 2]
    (first, _), (second, _) = core.sent
    assert core.texts(0) == [ids("query: a b"), ids("query: c")]
    assert core.texts(1) == list(map(ids, documents))
    assert (first.params.is_query, first.params.is_compared) == (True, False)
    assert (second.params.is_query, second.params.is_compared) == (False, True)
    assert first.params.normalize == second.params.normalize


async def test_dense_vectors_are_preferred_to_sparse_ones() -> None:
    tasks = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
    _, core = await score(["a"], ["b"], model=info(**{**SPARSE, "tasks": tasks}))
    assert core.sent[0][0].params.task is PoolingTask.EMBED


# Similarity of embeddings

rng = np.random.default_rng(7)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_class_scores_are_a_softmax_over_scaled_cosines() -> None:
    inputs, labels = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(3, 6)).astype(np.float32)
    logits = np.array([[20 * cosine(row, label) for label in labels] for row in inputs])
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert zero_shot_scores(inputs, labels) == pytest.approx(expected, abs=1e-6)
    examples = rng.normal(size=(5, 6)).astype(np.float32)
    example_labels = np.array([0, 1, 0, 2, 1])
    units = examples / np.linalg.norm(examples, axis=1, keepdims=True)
    means = np.stack([units[example_labels == label].mean(axis=0) for label in range(3)])
    scores = few_shot_scores(inputs, examples, example_labels.tolist(), 3)
    assert scores == pytest.approx(zero_shot_scores(inputs, means), abs=1e-6)


def test_cosines_of_all_lengths_are_from_minus_one_to_one() -> None:
    vectors = rng.normal(size=(1_000, 6)).astype(np.float32)
    vectors[0] = 0.0
    cosines = paired_cosine(1e-3 * vectors, np.concatenate([vectors[:500], -vectors[500:]]))
    assert (cosines[0], cosines[1:500].max(), cosines[500:].min()) == (0.0, 1.0, -1.0)  # rounding passes 1
    assert np.abs(cosines[1:]) == pytest.approx(np.ones(999), abs=1e-6)
