"""Servers started with the variables of TEI's and Infinity's documented `docker run` commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import numpy as np


def test_server_starts_with_variables_of_tei(launch, server, default_model: Path) -> None:
    """docker run -e MODEL_ID=... -e HF_TOKEN=... -p 8080:80 -v $PWD/data:/data, and a default prompt."""
    other = launch(
        "--env-compat",
        "tei",
        MODEL_ID=str(default_model),
        HF_TOKEN="token",
        HUGGINGFACE_HUB_CACHE="/data",
        HOSTNAME="3f2a9c1b",
        API_KEY="k",
        DTYPE="float32",
        DEFAULT_PROMPT="query: ",
        MAX_CLIENT_BATCH_SIZE="2",
    )
    key = {"authorization": "Bearer k"}
    assert other.post("/embed", {"inputs": ["A dam."]}).status_code == 401
    found = other.post("/embed", {"inputs": ["A dam."]}, **key).json()
    np.testing.assert_allclose(found, server.post("/embed", {"inputs": ["query: A dam."]}).json(), atol=1e-6)
    assert other.post("/embed", {"inputs": ["a", "b", "c"]}, **key).status_code in (413, 422)
    log = other.log.read_text()
    assert "API_KEY sets --api-key" in log
    assert "MAX_CLIENT_BATCH_SIZE=2 sets --max-inputs-per-request" in log


def test_server_starts_with_variables_of_infinity(launch, default_model: Path, tmp_path: Path) -> None:
    """docker run -e INFINITY_MODEL_ID="model1;model2;" -e INFINITY_URL_PREFIX=... -p 7997:7997."""
    folder = tmp_path / "second"
    shutil.copytree(default_model, folder)
    other = launch(
        PENSTOCK_ENV_COMPAT="infinity",
        INFINITY_MODEL_ID=f"{default_model};{folder};",
        INFINITY_SERVED_MODEL_NAME="first;second;",
        INFINITY_URL_PREFIX="/v1",
        INFINITY_BATCH_SIZE="8",
    )
    body = {"model": "second", "input": ["A dam."]}
    for path in ("/v1/embeddings", "/embeddings"):
        assert other.post(path, body).raise_for_status().json()["model"] == "second"
    rerank = {"model": "first", "query": "water", "documents": ["A dam.", "A song."]}
    assert len(other.post("/v1/rerank", rerank).raise_for_status().json()["results"]) == 2
    assert {row["id"] for row in httpx.get(f"{other.url}/v1/models").json()["data"]} == {"first", "second"}
