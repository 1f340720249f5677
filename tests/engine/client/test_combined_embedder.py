"""The calls of AsyncEngine: the requests that reach the core, and the results."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedTaskError,
)
from penstock.engine.protocol.model_info import AdapterSpec, ModelKind
from penstock.engine.protocol.multi_vector import (
    MultiVector,
    MultiVectorTokens,
    SparseKind,
    SparsePooling,
    TokenHeadFiles,
)
from penstock.engine.protocol.params import PoolingParams, RequestOptions
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from .word_model import WordCore, ids, info, tokenizer_pool

PARAMS = PoolingParams()
EVERY = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED)
ALL_AT_ONCE = {"tasks": EVERY, "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS)}
Make = Callable[..., tuple[AsyncEngine, WordCore]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    tokenizers = []

    def made(multi_vector_tokens: MultiVectorTokens | None = None, **changes: Any) -> tuple[AsyncEngine, WordCore]:
        tokenizers.append(tokenizer_pool(multi_vector_tokens))
        dispatcher = Dispatcher(max_queued_tokens=1_000)
        core = WordCore(dispatcher)
        config = EngineConfig(model="/words")
        return AsyncEngine(config, info(**changes), tokenizers[-1], dispatcher, Mock()), core

    yield made
    for tokenizer in tokenizers:
        tokenizer.close()


async def test_tokenization_counts_in_the_deadline(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core = make()
    encode = engine._tokenizer.encode

    async def slowly(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0.1)
        return await encode(*arguments, **named)

    monkeypatch.setattr(engine._tokenizer, "encode", slowly)
    await engine.embed(["a"], PARAMS, RequestOptions(timeout_s=600.0))
    await engine.embed(["a"], PARAMS)
    first, second = [submit.timeout_s for submit, _ in core.sent]
    assert first is not None
    assert 0.0 < first <= 599.9
    assert second is None
    with pytest.raises(DeadlineExceededError, match=r"^The deadline of 0\.05 s passed before the result\.$"):
        await engine.embed(["a"], PARAMS, RequestOptions(timeout_s=0.05))
    assert len(core.sent) == 2


async def test_skipped_tokens_have_no_vectors(make: Make) -> None:
    skips = MultiVector(skips_documents=True, skips_queries=False)
    multi_vector_tokens = MultiVectorTokens(skip_ids=tuple(ids("b d")))
    prompts = {"query": "query: ", "document": "document: "}
    engine, core = make(multi_vector_tokens, multi_vector=skips, prompts=prompts)
    result = await engine.token_embed(["a b c", "d e"], PARAMS)
    assert result.token_ids == [ids("document: a c"), ids("document: e")]
    assert result.num_tokens == [4, 3]
    for options in (RequestOptions(is_query=True), RequestOptions(prompt_name="query")):
        result = await engine.token_embed(["a b c"], PARAMS, options)
        assert result.token_ids == [ids("query: a b c")]
    await engine.token_embed(["a"], PARAMS, RequestOptions(prompt_name="query", is_query=False))
    assert [submit.params.is_query for submit, _ in core.sent] == [False, True, True, False]
    engine, _ = make(multi_vector_tokens)
    assert (await engine.token_embed(["a b c"], PARAMS)).token_ids == [ids("a b c")]
    engine, _ = make(token_heads=TokenHeadFiles(vectors_file="colbert_linear.pt"))
    assert (await engine.token_embed(["a b c"], PARAMS)).token_ids == [ids("b c")]
    engine, _ = make(token_heads=TokenHeadFiles(weights_file="sparse_linear.pt"))
    assert (await engine.token_embed(["a b c"], PARAMS)).token_ids == [ids("a b c")]


async def test_outputs_that_are_not_requested_are_absent(make: Make) -> None:
    engine, core = make(**ALL_AT_ONCE)
    result = await engine.embed_combined(["a"], EVERY[1:], PARAMS)
    assert result.embeddings is None
    assert result.vectors is not None
    assert (core.sent[0][0].params.task, core.sent[0][0].params.extra_tasks) == (EVERY[1], EVERY[2:])
    result = await engine.embed_combined(["a"], EVERY[2:], PARAMS)
    assert (result.embeddings, result.vectors, result.token_ids) == (None, None, None)
    result = await engine.embed_combined(["a"], EVERY[:1], PARAMS)
    assert (result.sparse, result.vectors, result.num_tokens) == (None, None, [1])
    assert result.embeddings is not None
    result = await engine.embed_combined(["a"], (EVERY[2], EVERY[0]), PARAMS)
    assert (result.vectors, result.token_ids) == (None, None)


async def test_equal_parameters_of_one_message_are_sent_once(make: Make) -> None:
    engine, core = make(**ALL_AT_ONCE, adapters=(AdapterSpec(name="legal", index=0),), default_adapter="legal")
    calls = (engine.embed, engine.token_embed, engine.sparse_embed)
    chosen = (RequestOptions(adapter="legal"), RequestOptions())
    await asyncio.gather(*(call(["a"], PARAMS, options) for call in calls for options in chosen for _ in range(4)))
    assert len({id(submit.params) for submit, _ in core.sent}) == len(calls)
    assert {submit.params.adapter for submit, _ in core.sent} == {"legal"}
    with pytest.raises(ModelNotFoundError, match="no LoRA adapter 'tax'"):
        await engine.embed(["a"], PARAMS, RequestOptions(adapter="tax"))


async def test_outputs_that_need_several_runs_are_rejected(make: Make) -> None:
    engine, core = make(**ALL_AT_ONCE, is_causal=True)
    with pytest.raises(UnsupportedTaskError, match="one output per request") as caught:
        await engine.embed_combined(["a"], EVERY, PARAMS)
    assert caught.value.param == "outputs"
    assert (await engine.embed_combined(["a"], EVERY[1:2], PARAMS)).vectors is not None
    engine, _ = make()
    with pytest.raises(UnsupportedTaskError, match="sparse_embed"):
        await engine.embed_combined(["a"], (EVERY[0], EVERY[2]), PARAMS)
    assert len(core.sent) == 1


async def test_classifier_takes_texts_and_pairs(make: Make) -> None:
    classifier = {"kind": ModelKind.SEQUENCE_CLASSIFIER, "tasks": (PoolingTask.CLASSIFY,), "labels": ("x", "y")}
    engine, core = make(**classifier)
    result = await engine.classify(["a b", "c d e"], PARAMS)
    assert (result.scores.tolist(), result.labels, result.num_tokens) == ([[1, 2], [3, 5]], ("x", "y"), [2, 3])
    result = await engine.classify_pairs([("a", "b c"), ("d", "e")], PARAMS)
    assert (result.scores.tolist(), result.num_tokens) == ([[1, 3], [4, 5]], [3, 2])
    assert core.sent[1][0].params.task is PoolingTask.CLASSIFY
    with pytest.raises(UnsupportedTaskError, match="labels and examples need an embedding model"):
        await engine.zero_shot(["a"], ["x", "y"], PARAMS)
    engine, core = make(**{**classifier, "kind": ModelKind.CROSS_ENCODER, "tasks": (PoolingTask.SCORE,)})
    await engine.classify_pairs([("a", "b")], PARAMS)
    assert core.sent[0][0].params.task is PoolingTask.SCORE


async def test_labels_and_examples_run_with_the_inputs(make: Make) -> None:
    engine, core = make()
    params = PoolingParams(use_activation=False)
    zero = await engine.zero_shot(["a", "b c"], ["d", "e"], params)
    few = await engine.few_shot(["a", "b c"], [("d", "x"), ("e", "y"), ("d e", "x")], params)
    assert core.texts(0) == [ids(text) for text in ("a", "b c", "d", "e")]
    assert core.texts(1) == [ids(text) for text in ("a", "b c", "d", "e", "d e")]
    assert (zero.labels, zero.num_tokens) == (("d", "e"), [3, 2])
    assert (few.labels, few.num_tokens) == (("x", "y"), [1 + 4, 2])
    assert all(submit.params.normalize for submit, _ in core.sent)
    for call in (engine.zero_shot(["a"], ["d", "d"], PARAMS), engine.few_shot(["a"], [("d", "x")], PARAMS)):
        with pytest.raises(InvalidRequestError, match=r"at least two different labels"):
            await call


async def test_call_without_inputs_is_rejected(make: Make) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Give at least one input\.$"):
        await make()[0].embed([], PARAMS)


async def test_step_model_returns_tokens_with_the_tag(make: Make) -> None:
    model = {"kind": ModelKind.TOKEN_CLASSIFIER, "tasks": (PoolingTask.TOKEN_CLASSIFY,), "labels": ("x", "y")}
    engine, _ = make(**model)
    result = await engine.token_classify(["a b a"], PARAMS)
    assert (result.token_ids, result.labels, result.num_tokens) == ([ids("a b a")], ("x", "y"), [3])
    engine, _ = make(**model, token_pooling=PoolingType.STEP)
    result = await engine.token_classify(["a b a"], PoolingParams(step_tag_id=ids("a")[0]))
    assert (result.token_ids, result.num_tokens) == ([ids("a a")], [3])


@pytest.mark.parametrize(
    ("call", "changes", "params", "rows"),
    [
        ("token_embed", {"is_matryoshka": True}, PoolingParams(dimensions=2), (6, 2)),
        (
            "token_classify",
            {"kind": ModelKind.TOKEN_CLASSIFIER, "tasks": (PoolingTask.TOKEN_CLASSIFY,), "labels": ("x", "y", "z")},
            PARAMS,
            (6, 3),
        ),
    ],
)
async def test_on_rows_is_called_before_the_core_runs(
    make: Make, call: str, changes: dict[str, Any], params: PoolingParams, rows: tuple[int, int]
) -> None:
    engine, core = make(**changes)
    seen: list[tuple[int, int]] = []

    def reject(num_rows: int, width: int) -> None:
        seen.append((num_rows, width))
        raise InvalidRequestError("too many")

    with pytest.raises(InvalidRequestError, match="too many"):
        await getattr(engine, call)([[1, 2, 3, 4], [1, 2]], params, RequestOptions(on_rows=reject))
    assert seen == [rows]
    assert not core.sent
    assert engine.stats().num_requests == 0
