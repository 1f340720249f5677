"""Late chunking gives the means of the rows of one forward over the joined inputs."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, AutoTokenizer

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.protocol.config import EngineConfig, PoolerConfig
from penstock.engine.protocol.errors import InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.model_info import DenseSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.tokenization.late_chunking import LateChunking, verify_late_chunking
from penstock.engine.tokenization.model_tokenizer import SpecialTokens, Truncation

from ...tables import cases

PARAMS = PoolingParams()
CHUNKS = ["Berlin is the capital of Germany.", "The city has 3.85 million people.", "It lies on the Spree."]
QUERY = RequestOptions(prompt_name="query")
CLS, SEP = 101, 102
SIZE = 64


def late(**changes: Any) -> LateChunking:
    special = SpecialTokens(np.array([CLS], np.int32), np.array([SEP], np.int32))
    limits = {name: changes.pop(name) for name in ("max_num_tokens", "may_truncate", "name") if name in changes}
    truncation = Truncation(**{"max_num_tokens": 12, **limits})
    defaults = {"special": special, "include_prompt": True, "truncation": truncation, "truncates_left": False}
    return LateChunking(**{**defaults, **changes})


def parts(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in lists]


@cases(__file__, "changes", "lists", "prompt", "ids", "spans", "counts")
def test_joined_inputs_share_the_special_tokens(
    changes: dict[str, Any],
    lists: list[list[int]],
    prompt: list[int],
    ids: list[int],
    spans: list[list[int]],
    counts: list[int] | None,
) -> None:
    text = late(**changes).join(parts(*lists), [True] * len(lists), prompt, is_complete=True)
    assert text.tokens.token_ids.tolist() == ids
    assert [list(span) for span in text.spans] == spans
    assert text.num_tokens == (counts or [last - first for first, last in spans])
    assert sum(text.num_tokens) == len(ids)


@pytest.mark.parametrize(
    ("is_text", "ids"), [([False, False], [1, 2]), ([True, False], [CLS, 1, 2]), ([False, True], [1, 2, SEP])]
)
def test_token_ids_get_no_special_tokens(is_text: list[bool], ids: list[int]) -> None:
    text = late().join(parts([1], [2]), is_text, [], is_complete=True)
    assert text.tokens.token_ids.tolist() == ids


@cases(__file__, "changes", "lists", "prompt", "message")
def test_input_without_tokens_is_rejected(
    changes: dict[str, Any], lists: list[list[int]], prompt: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        late(**changes).join(parts(*lists), [True] * len(lists), prompt, is_complete=True)


@pytest.mark.parametrize(("is_complete", "number"), [(True, "have 5 tokens"), (False, "have at least 5 tokens")])
def test_too_many_tokens_together_are_rejected(is_complete: bool, number: str) -> None:
    with pytest.raises(RequestTooLongError, match=f"context length is 4 tokens, but the inputs {number}") as caught:
        late(max_num_tokens=4).join(parts([1, 2], [3]), [True, True], [], is_complete=is_complete)
    assert (caught.value.num_tokens, caught.value.max_num_tokens) == (5, 4)


# An engine ---------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> AsyncIterator[AsyncEngine]:
    """The default model with a prompt and embeddings of any width."""
    folder = tmp_path_factory.mktemp("minilm")
    for entry in minilm_folder.iterdir():
        if entry.name != "config_sentence_transformers.json":
            (folder / entry.name).symlink_to(entry)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "find this: "}}))
    config = EngineConfig(
        model=str(folder),
        in_process=True,
        max_model_len=SIZE,
        hf_overrides={"is_matryoshka": True},
        dtype="float32",
        num_threads=1,
    )
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.close()


def normalised(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


on_engine_loop = pytest.mark.asyncio(loop_scope="module")


@on_engine_loop
async def test_vectors_are_means_of_rows_of_one_forward(engine: AsyncEngine, minilm_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    model = AutoModel.from_pretrained(minilm_folder, dtype=torch.float32).eval()
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in CHUNKS]
    prompt = tokenizer("find this: ", add_special_tokens=False)["input_ids"]
    for options, before in ((RequestOptions(), []), (QUERY, prompt)):
        ids = [CLS, *before, *pieces[0], *pieces[1], *pieces[2], SEP]
        ends = np.cumsum([1 + len(before) + len(pieces[0]), len(pieces[1]), len(pieces[2]) + 1]).tolist()
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        means = np.stack([hidden[first:last].mean(axis=0) for first, last in spans])
        result = await engine.embed_late(CHUNKS, PARAMS, options)
        assert np.abs(result.embeddings - normalised(means)).max() < 1e-5
        assert result.num_tokens == [last - first for first, last in spans]
    raw = await engine.embed_late(CHUNKS, PoolingParams(normalize=False, task=PoolingTask.EMBED), QUERY)
    assert np.abs(raw.embeddings - means).max() < 1e-5
    cut = await engine.embed_late(CHUNKS, PoolingParams(dimensions=48), QUERY)
    assert np.abs(cut.embeddings - normalised(means[:, :48])).max() < 1e-5
    as_ids = await engine.embed_late([[CLS, *prompt, *pieces[0]], pieces[1], [*pieces[2], SEP]], PARAMS)
    assert np.abs(as_ids.embeddings - normalised(means)).max() < 1e-5


@on_engine_loop
@pytest.mark.parametrize(
    ("text", "options"), [("a text", RequestOptions()), ("a text", QUERY), ([CLS, 2460, SEP], QUERY)]
)
async def test_one_input_gives_its_usual_vector(engine: AsyncEngine, text: Any, options: RequestOptions) -> None:
    expected = await engine.embed([text], PARAMS, options)
    result = await engine.embed_late([text], PARAMS, options)
    assert np.abs(result.embeddings - expected.embeddings).max() < 1e-6
    assert result.num_tokens == expected.num_tokens


@on_engine_loop
async def test_length_limit_counts_all_inputs_together(engine: AsyncEngine) -> None:
    chunks = ["word " * 30, "word " * 30, "word " * 30]
    with pytest.raises(RequestTooLongError, match="maximum context length is 64 tokens, but the inputs have 92 tokens"):
        await engine.embed_late(chunks, PARAMS)
    with pytest.raises(RequestTooLongError, match="at least"):
        await engine.embed_late(["word " * 100_000, "word"], PARAMS)
    cut = PoolingParams(truncate_prompt_tokens=-1)
    fitting = await engine.embed_late(["word " * 30, "word " * 29, "word " * 3], PARAMS)
    result = await engine.embed_late(["word " * 30, "word " * 29, "word " * 30], cut)
    assert result.num_tokens == [31, 29, 4]
    assert np.abs(result.embeddings - fitting.embeddings).max() < 1e-6
    with pytest.raises(InvalidRequestError, match="Give at least one input"):
        await engine.embed_late([], PARAMS)


@on_engine_loop
async def test_model_without_mean_pooling_is_rejected(engine: AsyncEngine, minilm_folder: Path) -> None:
    cls_pooled = await AsyncEngine.start(
        EngineConfig(
            model=str(minilm_folder), in_process=True, pooler_config=PoolerConfig(pooling_type=PoolingType.CLS)
        )
    )
    try:
        with pytest.raises(InvalidRequestError, match=r"pools by CLS \(--pooler-config\)") as caught:
            await cls_pooled.embed_late(CHUNKS, PARAMS)
    finally:
        await cls_pooled.close()
    assert caught.value.param == "late_chunking"
    sizes = {"folder": "2_Dense", "in_features": 384, "out_features": 8, "bias": True}
    linear, bent = (DenseSpec(**sizes, activation=name) for name in ("Identity", "Tanh"))
    verify_late_chunking(dataclasses.replace(engine.info, dense=(linear,)))
    with pytest.raises(InvalidRequestError, match=r"has a nonlinear Dense module \(Tanh\)"):
        verify_late_chunking(dataclasses.replace(engine.info, dense=(linear, bent)))
