"""A part that fails takes one request with it, not the server, and says so without the text of the request."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.model_files.model_folder import locate_model
from penstock.engine.protocol.errors import ModelLoadError

SECRET = "a sentence that belongs to somebody"


async def test_weights_with_nan_fail_the_inputs_that_meet_them(
    small_bert: Path, serving_folder, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned = 5_000
    async with serving_folder(small_bert) as (client, _):
        good = {"input": [[101, 7592, 102], [101, 2088, 102]]}
        expected = (await client.post("/v1/embeddings", json=good)).json()["data"]
        bad, beside = await asyncio.gather(
            client.post("/v1/embeddings", json={"input": [[101, 7592, 102], [101, poisoned, 102]]}),
            client.post("/v1/embeddings", json=good),
        )
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "model_execution_failed"
        assert bad.headers["x-request-id"] in bad.json()["message"]
        assert beside.status_code == 200
        again = (await client.post("/v1/embeddings", json=good)).json()["data"]
        for rows in (beside.json()["data"], again):
            assert [r["embedding"] for r in rows] == [pytest.approx(r["embedding"], abs=1e-6) for r in expected]
        assert (await client.get("/health/ready")).status_code == 200
    assert "not finite" in caplog.text


class Panic(BaseException):
    """What a panic of a Rust library looks like: no Exception, and with the text that it choked on."""


@pytest.mark.parametrize("failure", [RuntimeError("boom"), Panic(f"byte 3 is inside a character of {SECRET!r}")])
async def test_a_tokenizer_that_raises(
    failure: BaseException,
    minilm_folder: Path,
    serving_folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving_folder(minilm_folder) as (client, engine):
        encoder = engine._tokenizer._tokenizer
        encode = encoder.encode

        def fail_on_secret(inputs: Any, *arguments: Any) -> Any:
            if SECRET in inputs:
                raise failure
            return encode(inputs, *arguments)

        monkeypatch.setattr(encoder, "encode", fail_on_secret)
        answers = await asyncio.gather(
            *(client.post("/v1/embeddings", json={"input": text}) for text in ("one", SECRET, "two", SECRET, "three"))
        )
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
        assert "boom" not in answers[1].text
        assert SECRET not in answers[1].text
        for wrong in ([30_522], [-1], [2**31], [2**63]):
            response = await client.post("/v1/embeddings", json={"input": wrong})
            assert response.status_code == 400
        assert (await client.post("/v1/embeddings", json={"input": "after all"})).status_code == 200
        assert engine.stats().num_tokens == 0
    assert answers[1].headers["x-request-id"] in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_model_that_cannot_be_stored_says_why(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> str:
        raise OSError(code, os.strerror(code), "/cache/models--owner--name")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelLoadError, match=os.strerror(code)) as failed:
        locate_model("owner/name")
    assert "owner/name" in failed.value.message
    assert "/cache/models--owner--name" in failed.value.message
    assert "\n" not in failed.value.message


def test_a_hub_that_cannot_be_reached_is_named_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("Got: ConnectError: no route to host\nAn error happened")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r": ConnectError: no route to host$") as failed:
        locate_model("owner/name")
    assert "Got:" not in failed.value.message


@pytest.mark.slow
def test_a_real_server_goes_on_beside_what_fails(launch, small_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_bert, folder)
    words = ["One", "short", "text", "to", "begin", "with", ".", "a", "b", "hello"]
    vocab = {word: i for i, word in enumerate(words)} | {"poison": 5_000}  # no token for unknown words: it raises
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for file in ("vocab.txt", "special_tokens_map.json"):
        (folder / file).unlink(missing_ok=True)
    server = launch(model=folder)
    kinds = {
        "good": ("hello hello", 200),
        "NaN weights": ("hello poison", 500),
        "ids with NaN weights": ([9, 5_000], 500),
        "id out of range": ([30_522], 400),
        "negative id": ([-1], 400),
        "id of 64 bits": ([2**63], 400),
        "tokenizer that raises": (SECRET, 500),
    }
    counts: Counter[tuple[str, int]] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/embeddings", json={"input": "hello hello"}).json()["data"]
        began_s = time.monotonic()

        def ask(name: str) -> None:
            response = client.post("/v1/embeddings", json={"input": kinds[name][0]})
            counts[name, response.status_code] += 1
            if name == "good":
                vector = response.json()["data"][0]["embedding"]
                assert vector == pytest.approx(expected[0]["embedding"], abs=1e-5)
            else:
                assert response.headers["x-request-id"]
                assert SECRET not in response.text

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(ask, list(kinds) * 30))
        seconds = time.monotonic() - began_s
        assert client.get("/health/ready").status_code == 200
    print(f"{counts.total()} requests in {seconds:.1f} s: {dict(counts)}")
    assert set(counts) == {(name, status) for name, (_, status) in kinds.items()}
    assert server.metric("penstock_engine_restarts_total") == 0
    assert server.metric("penstock_engine_requests") == 0
    assert SECRET not in server.log.read_text()
