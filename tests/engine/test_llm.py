"""LLM runs vLLM's offline examples with the results of sentence-transformers and transformers."""

import asyncio
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from penstock.engine import LLM, AsyncEngine, EngineConfig, EngineError, PoolerConfig, PoolingParams, SchedulerConfig
from penstock.engine.daemon_threads import EventLoopThread
from penstock.engine.llm import run_in_slices
from penstock.engine.protocol.errors import EngineUnavailableError, InvalidRequestError, UnsupportedTaskError

PROMPTS = ["Hello my name is", "The best thing about water", "A dam."]


@pytest.fixture(scope="module")
def llm(minilm_folder: Path) -> Iterator[LLM]:
    with LLM(model=str(minilm_folder), runner="pooling", enforce_eager=True, dtype="float32", device="cpu") as llm:
        yield llm


def test_embeddings_equal_sentence_transformers(llm: LLM, minilm_folder: Path) -> None:
    outputs = llm.embed(PROMPTS)
    expected = SentenceTransformer(str(minilm_folder), device="cpu").encode(PROMPTS, normalize_embeddings=True)
    for output, row in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, row, atol=2e-5)
    assert [output.num_tokens for output in outputs] == [6, 7, 5]
    (raw,) = llm.embed("A dam.", pooling_params=PoolingParams(normalize=False))
    assert np.linalg.norm(raw.outputs.embedding) != pytest.approx(1, abs=1e-3)
    (cut,) = llm.embed(PROMPTS[1], truncate_prompt_tokens=4)
    assert cut.num_tokens == 4


def test_prompt_may_be_text_ids_or_dict(llm: LLM) -> None:
    (text,) = llm.embed("a dam")
    ids = llm.encode("a dam", pooling_task="token_embed")
    assert ids[0].num_tokens == text.num_tokens == 4
    forms = [101, 1037, 5477, 102]
    for given in (forms, np.array(forms), [forms], {"prompt_token_ids": forms}, [np.array(forms)], {"prompt": "a dam"}):
        (output,) = llm.embed(given)  # type: ignore[arg-type]
        np.testing.assert_allclose(output.outputs.embedding, text.outputs.embedding, atol=1e-6)
    assert len(llm.embed(["a dam", forms, {"prompt": "b"}])) == 3
    for wrong in ([3.5], [None], {"text": "a"}, []):
        with pytest.raises(InvalidRequestError, match=r"Input 0 is|at least one"):
            llm.embed(wrong)  # type: ignore[arg-type]


def test_each_input_takes_its_own_params(llm: LLM) -> None:
    each = [PoolingParams(normalize=False), PoolingParams(), PoolingParams(normalize=False)]
    alone = [llm.embed(prompt, pooling_params=own)[0] for prompt, own in zip(PROMPTS, each, strict=True)]
    for outputs in (llm.embed(PROMPTS, pooling_params=each), llm.encode(PROMPTS, each, pooling_task="embed")):
        for output, expected in zip(outputs, alone, strict=True):
            vector = getattr(output.outputs, "embedding", None)
            vector = output.outputs.data if vector is None else vector  # type: ignore[union-attr]
            np.testing.assert_allclose(vector, expected.outputs.embedding, atol=1e-5)
            assert output.num_tokens == expected.num_tokens
    for wrong in (each[:2], []):
        with pytest.raises(InvalidRequestError, match=f"There are {len(wrong)} pooling_params for 3 inputs"):
            llm.encode(PROMPTS, wrong)


def test_score_is_the_cosine_of_the_embeddings(llm: LLM) -> None:
    outputs = llm.score("What holds back the water?", ["A dam.", "A song."])
    vectors = [output.outputs.embedding for output in llm.embed(["What holds back the water?", "A dam.", "A song."])]
    assert [output.outputs.score for output in outputs] == pytest.approx(
        [float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])], abs=1e-5
    )
    (output,) = llm.score("a", "b")
    assert isinstance(output.outputs.score, float)
    (cut,) = llm.score("a " * 30, "b " * 30, truncate_prompt_tokens=5)
    assert cut.num_tokens == 10
    with pytest.raises(InvalidRequestError, match="2 texts cannot be paired with 3"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(InvalidRequestError, match="instruction"):
        llm.score("a", "b", instruction="Find dams.")
    with pytest.raises(InvalidRequestError, match="'unknown'"):
        llm.embed("a", prompt_name="unknown")


def test_encode_runs_the_pooling_task(llm: LLM) -> None:
    (rows,) = llm.encode(["a dam"], pooling_task="token_embed")
    assert rows.outputs.data.shape == (4, 384)
    (vector,) = llm.encode("a dam")
    np.testing.assert_array_equal(vector.outputs.data, llm.embed("a dam")[0].outputs.embedding)
    for task in ("classify", "token_classify"):
        with pytest.raises(UnsupportedTaskError, match="does not support"):
            llm.encode("a dam", pooling_task=task)
    with pytest.raises(InvalidRequestError, match="pooling_task is 'plugin'"):
        llm.encode("a dam", pooling_task="plugin")


def test_long_list_runs_in_slices_with_a_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [f"number {i}" for i in range(260)]  # a slice has 256
    for method in (partial(llm.score, "number"), llm.encode, llm.embed):
        outputs: Any = method(prompts)
        assert "260/260" in capfd.readouterr().err
    np.testing.assert_allclose(outputs[259].outputs.embedding, llm.embed(prompts[259])[0].outputs.embedding, atol=1e-5)
    assert len(llm.embed(prompts[:2])) == 2
    assert capfd.readouterr().err == ""
    assert len(llm.embed(prompts, use_tqdm=False)) == 260
    assert capfd.readouterr().err == ""
    with pytest.raises(InvalidRequestError, match=r"^Input 44 is a data URI") as caught:
        llm.embed([*(prompts * 2)[:300], "data:image/png;base64,iVBORw0KGgo="])
    assert caught.value.__notes__ == ["The numbers of inputs in this message begin at input 256 of the list."]
    assert len(llm.embed("still alive")) == 1


async def test_two_slices_run_at_a_time() -> None:
    num_running = most = 0

    async def call(inputs: list[Any]) -> list[Any]:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0)
        num_running -= 1
        return inputs

    inputs = range(10_000)
    assert await run_in_slices(call, inputs, shows_progress=False) == list(inputs)
    assert most == 2


def test_class_probabilities_equal_transformers(save_bert: Callable[..., Path]) -> None:
    folder = save_bert("BertForSequenceClassification", num_labels=3)
    reference = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        outputs = llm.classify(PROMPTS)
        data = [output.outputs.data for output in llm.encode(PROMPTS)]
    with torch.no_grad():
        for prompt, output, row in zip(PROMPTS, outputs, data, strict=True):
            logits = reference(**tokenizer(prompt, return_tensors="pt")).logits[0]
            np.testing.assert_allclose(output.outputs.probs, logits.softmax(0), atol=1e-5)
            np.testing.assert_array_equal(row, output.outputs.probs)
            assert output.outputs.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_finalizer_in_the_loops_own_thread_ends_it() -> None:
    loop = EventLoopThread()

    async def finalize() -> None:
        loop.stop_after(partial(asyncio.sleep, 0))

    loop.run(finalize())
    loop._thread.join(60)
    assert not loop._thread.is_alive()


def test_finalizer_does_not_wait_for_the_engine() -> None:
    loop, may_end = EventLoopThread(), threading.Event()
    loop.stop_after(partial(asyncio.to_thread, may_end.wait, 60))
    assert loop.run(asyncio.sleep(0, 7)) == 7
    may_end.set()
    loop._thread.join(60)
    assert not loop._thread.is_alive()


@pytest.mark.parametrize("closes", [True, False])
def test_ended_llm_leaves_no_callback_for_the_exit(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    engine = Mock(close=AsyncMock())
    monkeypatch.setattr(AsyncEngine, "start", AsyncMock(return_value=engine))
    llm = LLM("m")
    callback, thread = weakref.ref(llm._close_at_exit), llm._loop._thread
    if closes:
        llm.close()
    assert callback() is not None
    del llm
    assert callback() is None
    thread.join(60)
    engine.close.assert_awaited_once_with()


def test_call_beside_the_end_of_the_loop_fails() -> None:
    loop = EventLoopThread()

    async def wait() -> None:
        loop._loop.call_soon(loop._loop.stop)
        await asyncio.Event().wait()

    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match="was closed"):
            loop.run(wait())
        loop._thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [True, False])
def test_program_without_close_stops_its_engine(minilm_folder: Path, tmp_path: Path, in_process: bool) -> None:
    code = f"from penstock.engine import LLM\nllm = LLM({str(minilm_folder)!r}, device='cpu', in_process={in_process})"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=600)
    assert (run.stderr, list(tmp_path.glob("penstock-*"))) == ("", [])


def test_failed_start_has_the_settings_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[EngineConfig, str]] = []

    async def start(config: EngineConfig, *, log_level: str) -> None:
        started.append((config, log_level))
        raise EngineError("no")

    monkeypatch.setattr(AsyncEngine, "start", start)
    threads = threading.active_count()
    given: tuple[dict[str, Any], ...] = ({}, {"enforce_eager": True, "hf_overrides": {"a": 1}, "log_level": "ERROR"})
    for settings in given:
        with pytest.raises(EngineError, match="no"):
            LLM("m", **settings)
    assert [(config.cuda_graphs, config.hf_overrides, level) for config, level in started] == [
        (True, {}, "WARNING"),
        (False, {"a": 1}, "ERROR"),
    ]
    assert started[0][0].scheduler.max_queue_s == math.inf
    assert threading.active_count() == threads


def test_settings_reach_the_engine(minilm_folder: Path) -> None:
    limits: dict[str, Any] = {"device": "cpu", "max_queued_chars": 9, "scheduler": SchedulerConfig(max_queued_tokens=9)}
    with LLM(str(minilm_folder), pooler_config={"pooling_type": "CLS"}, max_model_len=16, **limits) as llm:
        assert llm.info.sequence_pooling == ("CLS",)
        assert len(llm.embed(["word " * 300] * 8, truncate_prompt_tokens=-1)) == 8  # the queue has no limits
        with pytest.raises(EngineError, match="maximum context length is 16 tokens"):
            llm.embed("word " * 30)
    llm.close()  # a second time
    with pytest.raises(EngineError, match="was closed"):
        llm.embed("a")
    with pytest.raises(ValueError, match="runner is 'generate'"):
        LLM(str(minilm_folder), runner="generate")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bogus"):
        LLM(str(minilm_folder), bogus=1)
    with pytest.raises(ValueError, match="unknown field 'pooling'"):
        LLM(str(minilm_folder), pooler_config={"pooling": "CLS"})
    with pytest.raises(EngineError, match="/no/such/model"):
        LLM("/no/such/model", pooler_config=PoolerConfig())
