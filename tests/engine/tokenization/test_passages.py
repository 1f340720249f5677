"""Long documents are split into passages, and the best passage gives the score of the document."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.results import ScoreResult
from penstock.engine.tokenization.long_text import MIN_PASSAGE_TOKENS, Passages, split_text

from ...tables import cases, table
from ..engines import running


def offsets_of(text: str, pattern: str = r"\S+") -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(pattern, text)]


# (text, pattern of a token, room, limit, pieces)
SPLITS = table(__file__, "text_is_split_between_words")


@pytest.mark.parametrize(("text", "pattern", "room", "limit", "pieces"), SPLITS)
def test_text_is_split_between_words(text: str, pattern: str, room: int, limit: int, pieces: list[str]) -> None:
    assert split_text(text, offsets_of(text, pattern), room, limit) == pieces


def test_best_passage_scores_for_its_document() -> None:
    documents = ["w " * (MIN_PASSAGE_TOKENS + 1), "short", "w " * 40, "w " * 40]
    rooms = [MIN_PASSAGE_TOKENS, MIN_PASSAGE_TOKENS, 20, MIN_PASSAGE_TOKENS - 1]
    pieces = Passages.of(documents, [offsets_of(document) for document in documents], rooms, 3)
    assert pieces.owners == [0, 0, 1, 2, 2, 3]
    assert pieces.texts[2:] == ["short", ("w " * 20).strip(), ("w " * 20).strip(), documents[3]]
    scores = np.array([0.1, 0.9, -1, 0.3, 0.2, 0.5], np.float32)
    joined = pieces.join(ScoreResult(scores, [1, 2, 3, 4, 5, 6]))
    np.testing.assert_array_equal(joined.scores, np.array([0.9, -1, 0.3, 0.5], np.float32))
    assert joined.num_tokens == [3, 3, 9, 6]


@cases(__file__, "lengths", "limit", "spare", "num_pieces", "truncated")
def test_documents_above_the_passage_limit_are_named(
    lengths: list[int], limit: int, spare: int, num_pieces: int, truncated: list[int]
) -> None:
    documents = ["w " * length for length in lengths]
    offsets = [offsets_of(document) for document in documents]
    pieces = Passages.of(documents, offsets, [20] * len(documents), limit, spare=spare)
    assert (len(pieces.texts), pieces.truncated_documents) == (num_pieces, truncated)


MAX_MODEL_LEN = 40
QUERY = "what holds back the water"  # 5 tokens
NEEDLE = "the gate holds back the water of the lake"  # 9 tokens
WORDS = ["bread", "song", "paper", "stone", "chair"] * 40
LONG = " ".join([*WORDS[:130], NEEDLE, *WORDS[130:]])


def words(first: int, last: int) -> str:
    return " ".join(LONG.split()[first:last])


CUT = PoolingParams(truncate_prompt_tokens=-1)


async def check_pieces(engine: AsyncEngine, size: int) -> None:
    """Checks that passages of LONG have `size` words and that the best score is that of the document."""
    documents = [LONG, "a dam", words(0, size), ""]
    num_words = len(LONG.split())
    pieces = [words(first, first + size) for first in range(0, num_words, size)]
    alone = await engine.score([QUERY], [*pieces, *documents[1:]], CUT)
    truncated: list[int] = []
    await engine.score([QUERY], documents, CUT, RequestOptions(on_truncated=truncated.append))
    assert truncated == [1]
    for limit in (2, 10_000):
        truncated.clear()
        options = RequestOptions(max_passages=limit, on_truncated=truncated.append)
        result = await engine.score([QUERY], documents, CUT, options)
        assert truncated == ([1] if limit == 2 else [])
        best = max(alone.scores[: min(limit, len(pieces))])
        np.testing.assert_allclose(result.scores, [best, *alone.scores[len(pieces) :]], atol=1e-6)
        repeated = await engine.score([QUERY] * 4, documents, PoolingParams(), options)
        np.testing.assert_allclose(repeated.scores, result.scores, atol=1e-6)
    assert sum(result.num_tokens) == sum(alone.num_tokens)
    cut = await engine.score([QUERY], documents, CUT)
    assert cut.scores[0] != pytest.approx(result.scores[0], abs=1e-4)


async def check_rejections(engine: AsyncEngine, size: int) -> None:
    """Checks that a document that must not be truncated is rejected if its passages cannot hold it."""
    uncut = PoolingParams(reject_too_long=True)
    documents = [LONG, words(0, 20)]
    pieces = await engine.score([QUERY], documents, uncut, RequestOptions(max_passages=20))
    (alone,) = (await engine.score([QUERY], documents[1:], uncut)).scores
    assert pieces.scores[1] == pytest.approx(alone, abs=1e-6)
    assert sum(pieces.num_tokens) > len(LONG.split())
    match = f"Document 0 has 209 tokens, which do not fit into 2 passages of up to {size - 4}"
    with pytest.raises(RequestTooLongError, match=match):
        await engine.score([QUERY], documents, uncut, RequestOptions(max_passages=2))
    with pytest.raises(RequestTooLongError, match="maximum context length"):
        await engine.score(["water " * 60], documents, uncut, RequestOptions(max_passages=20))
    uri, options = "data:image/png;base64,x", RequestOptions(max_passages=20)
    await engine.score([QUERY], [f"{words(0, size)} {uri}"], PoolingParams(), options)  # a passage begins with it
    with pytest.raises(InvalidRequestError, match="Input 1 is a data URI"):
        await engine.score([QUERY], [LONG, uri], PoolingParams(), options)


async def test_cross_encoder_scores_the_best_passage(save_bert: Callable[..., Path]) -> None:
    folder = save_bert("BertForSequenceClassification", num_labels=1, initializer_range=0.3)
    async with running(folder, max_model_len=MAX_MODEL_LEN) as engine:
        await check_pieces(engine, MAX_MODEL_LEN - 5 - 3 - 1)
        truncated: list[int] = []
        options = RequestOptions(max_passages=5, on_truncated=truncated.append)
        hopeless = await engine.score(["water " * 60], [LONG], CUT, options)
        assert truncated == [2]  # the query and the document
        cut = await engine.score(["water " * 60], [LONG], CUT)
        assert hopeless.scores == cut.scores  # the query leaves no room for pieces
        with pytest.raises(InvalidRequestError, match="normalize"):
            await engine.score([QUERY], [LONG], PoolingParams(normalize=True), RequestOptions(max_passages=2))
        await check_rejections(engine, MAX_MODEL_LEN - 5 - 3 - 1)


async def test_embedding_model_scores_the_best_passage(save_bert: Callable[..., Path]) -> None:
    async with running(save_bert(initializer_range=0.3), max_model_len=MAX_MODEL_LEN) as engine:
        await check_pieces(engine, MAX_MODEL_LEN - 2 - 1)
        await check_rejections(engine, MAX_MODEL_LEN - 2 - 1)
