"""Score and rerank: the pairs that run, the vectors that are compared, and the token counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.scoring import PairScorer
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions
from penstock.engine.protocol.results import ScoreResult
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.tokenization.input_encoder import InputEncoder

from .word_model import TABLE, PlayedCore, ids, info, tokenizer_pool

PROMPTS = {"query": "query: ", "document": "document: "}
LATE = {"tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE), "multi_vector": MultiVector()}
SPARSE_TASKS = {"tasks": (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)}
SPARSE = {**SPARSE_TASKS, "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}
CROSS_ENCODER = {"kind": ModelKind.CROSS_ENCODER, "tasks": (PoolingTask.SCORE,), "labels": ("relevant",)}
DOCUMENTS = ["b c", "a a d", "e"]


class Bench:
    """A scorer and the core behind it."""

    def __init__(self, model: ModelInfo, *, auto_truncate: bool = False) -> None:
        self.dispatcher = Dispatcher(max_queued_tokens=1_000)
        self.core = PlayedCore(self.dispatcher)
        self._tokenizer = tokenizer_pool()
        encoder = InputEncoder(model, self._tokenizer, EngineConfig(model="/words", auto_truncate=auto_truncate))
        self._scorer = PairScorer(model, encoder, self.dispatcher)

    async def score(
        self,
        left: list[str],
        right: list[str],
        *,
        params: PoolingParams | None = None,
        num_left: tuple[int, int] = (0, 0),
        **options: Any,
    ) -> ScoreResult:
        try:
            return await self._scorer.score(left, right, params or PoolingParams(), RequestOptions(**options))
        finally:
            self._tokenizer.close()
            assert (self.dispatcher.stats.num_requests, self.dispatcher.stats.num_tokens) == num_left

    def texts(self, place: int = 0) -> list[list[int]]:
        return [tokens.token_ids.tolist() for tokens in self.core.sent[place][1]]


def vector(text: str) -> np.ndarray:
    total = TABLE[ids(text)].sum(axis=0)
    return total / np.linalg.norm(total)


def max_sim(query: str, document: str) -> float:
    return float((TABLE[ids(document)] @ TABLE[ids(query)].T).max(axis=0).sum())


async def test_cosine_of_one_query_or_of_one_for_each_document() -> None:
    bench = Bench(info())
    result = await bench.score(["a b c"], DOCUMENTS)
    assert result.scores == pytest.approx([vector("a b c") @ vector(d) for d in DOCUMENTS], abs=1e-6)
    assert result.num_tokens == [2 + 3, 3, 1]  # the query counts once
    assert bench.texts() == [ids("a b c"), *map(ids, DOCUMENTS)]
    assert bench.core.sent[0][0].params.normalize is True
    result = await (bench := Bench(info())).score(["a", "b b", "c"], DOCUMENTS)
    assert result.scores == pytest.approx(
        [vector(q) @ vector(d) for q, d in zip("abc", DOCUMENTS, strict=True)], abs=1e-6
    )
    assert result.num_tokens == [3, 5, 2]


async def test_parameters_that_scores_have_no_use_for_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="it does not take dimensions"):
        await Bench(info()).score(["a"], ["b"], params=PoolingParams(dimensions=4))
    await (bench := Bench(info(normalize=False))).score(["a"], ["b"])
    assert bench.core.sent[0][0].params.normalize is True


@pytest.mark.parametrize("asked", [True, False])
async def test_embedder_refuses_use_activation_for_scores(asked: bool) -> None:
    with pytest.raises(InvalidRequestError, match="use_activation belongs to scores of a cross-encoder; words") as told:
        await (bench := Bench(info())).score(["a"], ["b"], params=PoolingParams(use_activation=asked))
    assert told.value.param == "use_activation"
    assert not bench.core.sent


async def test_prompts_of_queries_and_documents() -> None:
    await (bench := Bench(info(prompts=PROMPTS))).score(["a"], ["b"])
    assert bench.texts() == [ids("query: a"), ids("document: b")]
    await (bench := Bench(info(prompts=PROMPTS))).score(["a"], ["b"], prompt_name="document")
    assert bench.texts() == [ids("document: a"), ids("document: b")]
    await (bench := Bench(info(prompts=PROMPTS))).score(["a"], ["b"], prompt="")
    assert bench.texts() == [ids("a"), ids("b")]
    instructed = {"query": "Instruct: a \nQuery: ", "document": "document: "}
    await (bench := Bench(info(prompts=instructed))).score(["a"], ["b"], instruction="find ")
    assert bench.texts() == [ids("Instruct: find Query: a"), ids("document: b")]
    default = {"mine": "Instruct: a \nQuery: "}
    await (bench := Bench(info(prompts=default, default_prompt_name="mine"))).score(["a"], ["b"], instruction="find ")
    assert bench.texts()[0] == ids("Instruct: find Query: a")
    with pytest.raises(InvalidRequestError, match=r"takes no instruction"):
        await Bench(info(prompts=PROMPTS)).score(["a"], ["b"], instruction="find ")


@pytest.mark.parametrize("averages", [False, True])
async def test_late_scores_sum_or_average_the_best_match_of_each_token(averages: bool) -> None:
    bench = Bench(info(**{**LATE, "multi_vector": MultiVector(averages=averages)}))
    result = await bench.score(["a b c"], DOCUMENTS)
    expected = [max_sim("a b c", document) / (3 if averages else 1) for document in DOCUMENTS]
    assert result.scores == pytest.approx(expected, abs=1e-5)
    assert result.num_tokens == [2 + 3, 3, 1]


async def test_late_queries_that_come_again_run_and_count_once() -> None:
    bench = Bench(info(**LATE, prompts=PROMPTS))
    result = await bench.score(["a b", "c", "a b"], DOCUMENTS)
    queries, documents = ["query: a b", "query: c", "query: a b"], [f"document: {d}" for d in DOCUMENTS]
    expected = [max_sim(q, d) for q, d in zip(queries, documents, strict=True)]
    assert result.scores == pytest.approx(expected, abs=1e-5)
    assert result.num_tokens == [3 + 3, 4 + 2, 2]
    (first, _), (second, _) = bench.core.sent
    assert bench.texts(0) == [ids("query: a b"), ids("query: c")]
    assert bench.texts(1) == list(map(ids, documents))
    assert (first.params.is_query, first.params.is_compared) == (True, False)
    assert (second.params.is_query, second.params.is_compared) == (False, True)
    assert first.params.normalize == second.params.normalize


async def test_a_late_request_is_let_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(info(**LATE))
    answer = bench.core._answer

    def fill(*arguments: Any) -> None:
        monkeypatch.setattr(bench.core, "_answer", answer)
        bench.dispatcher.admission.enter(1_000)  # of others, so that nobody else is let in
        answer(*arguments)

    monkeypatch.setattr(bench.core, "_answer", fill)
    await bench.score(["a b c"], DOCUMENTS, num_left=(1, 1_000))


@pytest.mark.parametrize("is_cosine", [False, True])
async def test_sparse_scores_are_dot_products_or_cosines(is_cosine: bool) -> None:
    recipe = SparsePooling(kind=SparseKind.TOKEN_WEIGHTS, is_cosine=is_cosine)
    result = await (bench := Bench(info(**SPARSE_TASKS, sparse=recipe))).score(["a a b"], DOCUMENTS)
    lengths = (5 * 2) ** 0.5, (5 * 5) ** 0.5
    expected = [1 / lengths[0], 4 / lengths[1], 0] if is_cosine else [1, 4, 0]
    assert result.scores == pytest.approx(expected, abs=1e-6)
    assert result.num_tokens == [2 + 3, 3, 1]
    assert len(bench.core.sent) == 1
    result = await Bench(info(**SPARSE_TASKS, sparse=recipe)).score(["a", "b", "e e"], DOCUMENTS)
    assert result.scores == pytest.approx([0, 0, 1 if is_cosine else 2], abs=1e-6)
    assert result.num_tokens == [3, 4, 3]


async def test_a_dense_model_with_sparse_vectors_is_scored_by_the_dense_ones() -> None:
    recipe = SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)
    tasks = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED, PoolingTask.SCORE)
    await (bench := Bench(info(tasks=tasks, sparse=recipe))).score(["a"], ["b"])
    assert bench.core.sent[0][0].params.task is PoolingTask.EMBED


async def test_a_cross_encoder_reads_each_pair_as_one() -> None:
    model = info(**CROSS_ENCODER)
    result = await (bench := Bench(model)).score(["a b"], DOCUMENTS)
    assert bench.texts() == [ids(f"a b {document}") for document in DOCUMENTS]
    assert result.scores.tolist() == [1, 1, 1]  # the first token, as the played core has it
    assert result.num_tokens == [4, 5, 3]
    result = await Bench(model).score(["a", "b", "c"], DOCUMENTS)
    assert result.scores.tolist() == [1, 2, 3]
    await (bench := Bench(model)).score(["a"], ["b"], params=PoolingParams(use_activation=False))
    assert bench.core.sent[0][0].params.use_activation is False


@pytest.mark.parametrize("changes", [{}, LATE])
async def test_the_best_piece_of_a_long_document_counts(changes: dict[str, Any]) -> None:
    words = ["c", "d", "e", "b"] * 10  # 40 tokens, of which the model reads 24
    bench = Bench(info(**changes))
    result = await bench.score(["a b", "c"], [" ".join(words), "d"], max_passages=3)
    ran = [text for place in range(len(bench.core.sent)) for text in bench.texts(place)]
    pieces = [text for text in ran if text not in (ids("a b"), ids("c"))]
    assert [token for piece in pieces for token in piece] == ids(" ".join([*words, "d"]))
    assert max(map(len, pieces)) <= 24
    scores = []
    for piece in pieces[:-1]:
        text, words = " ".join(words[: len(piece)]), words[len(piece) :]
        scores.append(max_sim("a b", text) if changes else vector("a b") @ vector(text))
    assert result.scores[0] == pytest.approx(max(scores), abs=1e-5)
    assert result.scores[1] == pytest.approx(max_sim("c", "d") if changes else vector("c") @ vector("d"), abs=1e-5)


async def test_a_document_that_fits_is_one_piece_and_its_prompt_takes_room() -> None:
    document = " ".join(["c"] * 23)  # a piece has room for one token more, as another text may need
    await (bench := Bench(info())).score(["a"], [document], max_passages=3)
    assert bench.texts() == [ids("a"), ids(document)]
    await (bench := Bench(info(prompts=PROMPTS))).score(["a"], [document], max_passages=3)
    assert all(text[0] == ids("document:")[0] and len(text) <= 24 for text in bench.texts()[1:])
    assert len(bench.texts()) in (3, 4)


async def test_a_long_document_is_cut_to_its_pieces_or_refused() -> None:
    document = " ".join(["c", "d"] * 40)
    result = await (bench := Bench(info())).score(["a"], [document], max_passages=2)
    assert sum(map(len, bench.texts())) < 80
    assert result.scores.shape == (1,)
    assert bench.core.sent[0][0].params.truncate_prompt_tokens == -1
    with pytest.raises(RequestTooLongError, match="Document 0 has 80 tokens, which do not fit into 2 pieces"):
        await Bench(info()).score(["a"], [document], params=PoolingParams(refuse_too_long=True), max_passages=2)
    cut = PoolingParams(truncate_prompt_tokens=20)
    await (bench := Bench(info())).score(["a"], [document], params=cut, max_passages=2)
    assert max(map(len, bench.texts())) <= 20
    with pytest.raises(RequestTooLongError, match="maximum context length is 24"):
        await Bench(info()).score(["a"], [document])
    await (bench := Bench(info(), auto_truncate=True)).score(["a"], [document])
    assert max(map(len, bench.texts())) == 24


@pytest.mark.parametrize(
    ("left", "right", "param", "message"),
    [
        ([], ["a"], "text_1", "at least one text on each side"),
        (["a"], [], "text_2", "at least one text on each side"),
        (["a", "b"], ["a"], "text_2", "2 texts cannot be paired with 1"),
        (["a", "b"], ["a", "b", "c"], "text_2", "2 texts cannot be paired with 3"),
    ],
)
async def test_numbers_of_texts_that_do_not_match(left: list[str], right: list[str], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await Bench(info()).score(left, right)
    assert caught.value.param == param


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", [{}, LATE, SPARSE, CROSS_ENCODER], ids=["dense", "late", "sparse", "jointly"])
async def test_a_text_that_is_too_long_is_of_no_field(changes: dict[str, Any], side: str) -> None:
    texts = {"left": ["a"], "right": ["b"], side: ["a " * 30]}
    with pytest.raises(RequestTooLongError) as caught:
        await Bench(info(**changes)).score(**texts)
    assert caught.value.param is None  # a pair has two fields, and who asks names them otherwise than we do
