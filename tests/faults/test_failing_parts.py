"""A part that fails takes one request with it, not the server, and says so without the text of the request."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_hub import locate_model

SECRET = "a sentence that belongs to somebody"


async def test_weights_with_nan_fail_the_inputs_that_meet_them(
    minilm_folder: Path, tmp_path: Path, serving_folder, caplog: pytest.LogCaptureFixture
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=30_522, **sizes))
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (minilm_folder / file).exists():
            (tmp_path / file).write_bytes((minilm_folder / file).read_bytes())
    poisoned = 5_000
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[poisoned] = float("nan")
    model.save_pretrained(tmp_path)
    async with serving_folder(tmp_path) as (client, _):
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
        pool = engine._tokenizer
        encode = pool._encode

        def fail_on_secret(inputs: Any, *arguments: Any) -> Any:
            if SECRET in inputs:
                raise failure
            return encode(inputs, *arguments)

        monkeypatch.setattr(pool, "_encode", fail_on_secret)
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
