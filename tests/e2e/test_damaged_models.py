"""Damaged model files: the model alone ends the server with exit code 2 or 3; beside others it gets 503."""

import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

Damage = Callable[[Path], object]
Copy = Callable[[Damage], Path]


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.fixture
def damaged(random_model: Callable[..., Path], tmp_path: Path) -> Copy:
    """Damage a copy of a model."""

    def copy(damage: Damage) -> Path:
        folder = shutil.copytree(random_model("BertModel"), tmp_path / "damaged")
        damage(folder)
        return folder

    return copy


def test_damaged_model_gets_503_and_others_serve(damaged: Copy, default_model: Path, launch, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    bad = damaged(write("model.safetensors", b""))
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
