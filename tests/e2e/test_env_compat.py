"""A server started with the variables of TEI's documented `docker run` command."""

from __future__ import annotations

from pathlib import Path

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
