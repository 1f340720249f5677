"""A model with damaged files gets 503 beside other models."""

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx


def test_damaged_model_gets_503_and_others_serve(
    random_model: Callable[..., Path], default_model: Path, launch, tmp_path: Path
) -> None:
    config = tmp_path / "penstock.toml"
    bad = shutil.copytree(random_model("BertModel"), tmp_path / "damaged")
    (bad / "model.safetensors").write_bytes(b"")
    config.write_text(
        f'[[models]]\nmodel = "{bad}"\nname = "bad"\n[[models]]\nmodel = "{default_model}"\nname = "good"\n'
    )
    server = launch("--config", str(config), "--dtype", "float32")
    for name, status in (("bad", 503), ("good", 200), ("bad", 503)):
        assert server.post("/v1/embeddings", {"model": name, "input": "A dam."}).status_code == status
    for path in ("/v1/models", "/metrics", "/health", "/api/tags"):
        assert httpx.get(server.url + path, timeout=60).status_code == 200, path
    server.stop()
    assert "Traceback" not in server.log.read_text()
