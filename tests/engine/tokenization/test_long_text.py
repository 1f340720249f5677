"""Long-text mode: texts above max_model_len are cut into windows and their vectors are averaged."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import PoolerConfig, SchedulerConfig
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import ChunkedProcessingMode
from penstock.engine.tokenization.long_text import LongText, Windows
from penstock.engine.tokenization.model_tokenizer import SpecialTokens

from ...tables import cases
from ..engines import running

PARAMS = PoolingParams()
SIZE = 16
TEXT = "The gate holds back the water of the long canal, and the penstock leads it down to the turbines. " * 3
SHORT = "a short text"
CLS, SEP = 101, 102
SPECIAL = SpecialTokens(np.array([CLS], np.int32), np.array([SEP], np.int32))
WINDOWS, VLLM = ChunkedProcessingMode.WINDOWS, ChunkedProcessingMode.VLLM


def tokens(*ids: int, num_skipped_tokens: int = 0) -> TokenizedInput:
    return TokenizedInput(np.array(ids, np.int32), num_skipped_tokens=num_skipped_tokens)


def ids_of(windows: Windows) -> list[list[int]]:
    return [w.token_ids.tolist() for w in windows.sequences]


def splitter(size: int, overlap: int = 0, mode: ChunkedProcessingMode = WINDOWS) -> LongText:
    return LongText(size, overlap, mode, SPECIAL)


def test_windows_weigh_by_their_text_tokens() -> None:
    short, long = tokens(CLS, 9, SEP), tokens(CLS, *range(1, 8), SEP)
    windows = splitter(5).split([short, long, short], [True] * 3)
    assert ids_of(windows) == [[CLS, 9, SEP], [CLS, 1, 2, 3, SEP], [CLS, 4, 5, 6, SEP], [CLS, 7, SEP], [CLS, 9, SEP]]
    assert windows.num_windows.tolist() == [1, 3, 1]
    assert windows.weights == pytest.approx([1, 3 / 7, 3 / 7, 1 / 7, 1])
    assert windows.num_tokens == [3, 9, 3]
    assert windows.sequences[0] is short


@pytest.mark.parametrize(("length", "overlap"), [(9, 0), (40, 0), (10, 1), (41, 3), (11, 6), (40, 6)])
def test_windows_cover_every_token_and_weights_sum_to_one(length: int, overlap: int) -> None:
    windows = splitter(9, overlap).split([tokens(CLS, *range(1, length + 1), SEP)], [True])
    bodies = [w.token_ids[1:-1].tolist() for w in windows.sequences]
    joined = bodies[0] + [i for body in bodies[1:] for i in body[overlap:]]
    assert joined == list(range(1, length + 1))
    assert all(len(body) == 7 for body in bodies[:-1])
    assert windows.weights.sum() == pytest.approx(1)
    shares = [sum(1 / sum(i in other for other in bodies) for i in body) / length for body in bodies]
    assert windows.weights == pytest.approx(shares)


def test_prompt_starts_every_window_without_weight() -> None:
    text = tokens(CLS, 50, 51, *range(1, 6), SEP, num_skipped_tokens=3)
    windows = splitter(7).split([text], [True], [50, 51])
    assert ids_of(windows) == [[CLS, 50, 51, 1, 2, 3, SEP], [CLS, 50, 51, 4, 5, SEP]]
    assert [w.num_skipped_tokens for w in windows.sequences] == [3, 3]
    assert windows.weights == pytest.approx([3 / 5, 2 / 5])
    # Cut on the left, the text starts within the prompt. Only the first window has the rest of the prompt.
    cut = tokens(CLS, 51, *range(1, 6), SEP, num_skipped_tokens=2)
    windows = splitter(7).split([cut], [True], [50, 51])
    assert ids_of(windows) == [[CLS, 51, 1, 2, 3, 4, SEP], [CLS, 5, SEP]]
    assert [w.num_skipped_tokens for w in windows.sequences] == [2, 0]


def test_token_ids_are_cut_without_special_tokens() -> None:
    windows = splitter(4, overlap=1).split([tokens(*range(1, 9), num_skipped_tokens=5)], [False], [50])
    assert ids_of(windows) == [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8]]
    assert [w.num_skipped_tokens for w in windows.sequences] == [3, 2, 0]


def test_vllm_mode_slices_the_whole_sequence() -> None:
    text = tokens(CLS, 50, *range(1, 6), SEP, num_skipped_tokens=2)
    windows = splitter(3, mode=VLLM).split([text], [True], [50])
    assert ids_of(windows) == [[CLS, 50, 1], [2, 3, 4], [5, SEP]]
    assert [w.num_skipped_tokens for w in windows.sequences] == [2, 0, 0]
    assert windows.weights == pytest.approx([3 / 8, 3 / 8, 2 / 8])
    assert not windows.renormalizes


@pytest.mark.parametrize("overlap", [0, 2])
def test_prompt_that_fills_a_window_is_rejected(overlap: int) -> None:
    prompt = range(50, 56 - overlap)
    text = tokens(CLS, *prompt, *range(1, 6), SEP)
    with pytest.raises(errors.InvalidRequestError, match=r"prompt takes \d of the 8 tokens of a window") as caught:
        splitter(8, overlap).split([text], [True], list(prompt))
    assert caught.value.param == "prompt_name"


def test_join_keeps_vectors_of_short_inputs() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    windows = splitter(5).split([tokens(1), tokens(CLS, *range(4), SEP), tokens(2)], [True] * 3)
    joined = windows.join(vectors, normalized=True)
    assert np.array_equal(joined[[0, 2]], vectors[[0, 3]])
    mean = 0.75 * vectors[1] + 0.25 * vectors[2]
    assert joined[1] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert windows.join(vectors, normalized=False)[1] == pytest.approx(mean, abs=1e-6)
    assert np.array_equal(Windows.unsplit([tokens(1)]).join(vectors[:1], normalized=True), vectors[:1])
    assert not windows.join(np.zeros_like(vectors), normalized=True).any()


# An engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(save_bert: Callable[..., Path]) -> Path:
    """A small BERT with a prompt, MEAN pooling and normalised embeddings."""
    folder = save_bert(initializer_range=0.5)
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{t}" if i else "", "type": f"sentence_transformers.models.{t}"}
        for i, t in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find this: "}}))
    return folder


class Reference:
    """Embeds windows with transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def embed(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns the normalised mean of the rows of each sequence."""
        rows = [self.model(torch.tensor([list(ids)])).last_hidden_state[0].mean(0) for ids in sequences]
        return torch.nn.functional.normalize(torch.stack(rows)).numpy()

    def mean(self, windows: Windows) -> np.ndarray:
        """Returns the normalised weighted mean of the windows of one text."""
        return normalised(windows.weights @ self.embed(ids_of(windows)))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


def serving(folder: Path, *, size: int | None = SIZE, max_queued_tokens: int = 100_000, **pooler: Any) -> Any:
    pooler_config = PoolerConfig(**{"enable_chunked_processing": True, **pooler})
    scheduler = SchedulerConfig(max_queued_tokens=max_queued_tokens)
    return running(folder, max_model_len=size, pooler_config=pooler_config, scheduler=scheduler)


def normalised(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("overlap", [0, 4])
async def test_embedding_is_the_weighted_mean_of_the_windows(tiny: Path, reference: Reference, overlap: int) -> None:
    body, prompt, short = reference.ids(TEXT), reference.ids("find this: "), [CLS, *reference.ids(SHORT), SEP]
    async with serving(tiny, chunk_overlap=overlap) as engine:
        result = await engine.embed([SHORT, TEXT, SHORT], PARAMS)
        with_prompt = await engine.embed([TEXT], PARAMS, RequestOptions(prompt_name="query"))
        as_ids = await engine.embed([[CLS, *body, SEP]], PARAMS)
        bare = await engine.embed([TEXT, body], PARAMS, RequestOptions(add_special_tokens=False, prompt=""))
        scores = await engine.score([TEXT], [SHORT, TEXT], PARAMS)
        assert engine.stats().num_tokens == 0
    long_text = splitter(SIZE, overlap)
    expected = reference.mean(long_text.split([tokens(CLS, *body, SEP)], [True]))
    short_vector = reference.embed([short])[0]
    assert result.embeddings[1] == pytest.approx(expected, abs=1e-5)
    assert result.embeddings[0] == pytest.approx(short_vector, abs=1e-5)
    assert result.num_tokens == [5, len(body) + 2, 5]
    assert bare.embeddings[0] == pytest.approx(bare.embeddings[1], abs=1e-5)
    assert bare.num_tokens == [len(body), len(body)]

    windows = long_text.split([tokens(CLS, *body, SEP)], [False])
    assert as_ids.embeddings[0] == pytest.approx(reference.mean(windows), abs=1e-5)
    windows = long_text.split([tokens(CLS, *prompt, *body, SEP)], [True], prompt)
    assert with_prompt.embeddings[0] == pytest.approx(reference.mean(windows), abs=1e-5)
    assert with_prompt.num_tokens == [len(prompt) + len(body) + 2]
    assert scores.scores == pytest.approx(with_prompt.embeddings[0] @ np.stack([short_vector, expected]).T, abs=1e-5)
    assert scores.num_tokens == [5 + with_prompt.num_tokens[0], len(body) + 2]


async def test_long_text_mode_leaves_short_texts_alone(tiny: Path) -> None:
    async with serving(tiny) as on, serving(tiny, enable_chunked_processing=None) as off:
        query = RequestOptions(prompt_name="query")
        for texts, options in (([SHORT, "word " * (SIZE - 2)], RequestOptions()), (["", SHORT], query)):
            vectors = [(await engine.embed(texts, PARAMS, options)).embeddings for engine in (on, off)]
            assert np.array_equal(*vectors)
        with pytest.raises(errors.RequestTooLongError, match="maximum context length is 16 tokens, but"):
            await off.embed([TEXT], PARAMS)
        with pytest.raises(errors.RequestTooLongError, match="maximum context length is 16 tokens, but"):
            await on.token_embed([TEXT], PARAMS)


async def test_vllm_mode_averages_slices(tiny: Path, reference: Reference) -> None:
    async with serving(tiny, chunked_processing_mode=VLLM) as engine:
        result = await engine.embed([TEXT, SHORT], PARAMS)
    ids = [CLS, *reference.ids(TEXT), SEP]
    slices = [ids[i : i + SIZE] for i in range(0, len(ids), SIZE)]
    mean = np.average(reference.embed(slices), axis=0, weights=[len(s) for s in slices])
    assert result.embeddings[0] == pytest.approx(mean, abs=1e-5)
    assert np.linalg.norm(result.embeddings[0]) < 0.99
    assert np.linalg.norm(result.embeddings[1]) == pytest.approx(1)


async def test_length_limits_of_long_text_mode(tiny: Path) -> None:
    text = "word " * 98
    async with serving(tiny, max_embed_len=100) as engine:
        assert (await engine.embed([text], PARAMS)).num_tokens == [100]
        with pytest.raises(errors.RequestTooLongError, match=r"is 100 tokens \(max_embed_len\), but input 1 has 101"):
            await engine.embed([text, text + "word"], PARAMS)
        # A text far above the limit is not read to its end.
        with pytest.raises(errors.RequestTooLongError, match=r"100 tokens \(max_embed_len\), .* at least \d+ tokens"):
            await engine.embed(["word " * 1_000_000], PARAMS)
        to_limit = await engine.embed([text + text], PoolingParams(truncate_prompt_tokens=-1))
        to_window = await engine.embed([text], PoolingParams(truncate_prompt_tokens=SIZE))
        between = await engine.embed([text], PoolingParams(truncate_prompt_tokens=50))
        assert (to_limit.num_tokens, to_window.num_tokens, between.num_tokens) == ([100], [SIZE], [50])
        assert np.array_equal(to_limit.embeddings, (await engine.embed([text], PARAMS)).embeddings)
        with pytest.raises(errors.InvalidRequestError, match=r"greater than max_embed_len.*101 > 100"):
            await engine.embed([text], PoolingParams(truncate_prompt_tokens=101))
    async with serving(tiny, max_queued_tokens=200) as engine:
        assert (await engine.embed(["word " * 170], PARAMS)).num_tokens == [172]
        with pytest.raises(errors.RequestTooLongError, match=r"200 tokens \(max_queued_tokens\), but input 0 has 202"):
            await engine.embed(["word " * 200], PARAMS)
        # All windows count, with the special tokens of each: 13 x 2 + 180.
        with pytest.raises(errors.InvalidRequestError, match="has 206 tokens; a request may have at most 200"):
            await engine.embed(["word " * 180], PARAMS)


@cases(__file__, "size", "pooler", "message")
async def test_windows_without_room_are_rejected_at_start(
    tiny: Path, size: int, pooler: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.ModelLoadError, match=message):
        async with serving(tiny, size=size, **pooler):
            pass


def test_tokenizer_that_changes_texts_has_no_windows() -> None:
    model: Any = SimpleNamespace(name="t5", enable_chunked_processing=True)
    with pytest.raises(errors.ModelLoadError, match=r"^--pooler-config: .* the tokenizer of t5 does more\.$"):
        LongText.of(model, None)
    model.enable_chunked_processing = False
    assert LongText.of(model, None) is None
