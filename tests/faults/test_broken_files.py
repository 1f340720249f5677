"""Commands over damaged files: whatever they hold, the answer is one line, and what runs gives the right numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .conftest import COMMAND, Launch

QUERY = "encoder.layer.0.attention.self.query.weight"


def config_with(**values: Any) -> Callable[[Path], None]:
    """Change config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def weight_with(value: float) -> Callable[[Path], None]:
    """Put a value into one place of a weight."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        tensors[QUERY][0, 0] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def index_to(file: str) -> Callable[[Path], None]:
    """Let an index of shards lead elsewhere."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
        index = {"metadata": {}, "weight_map": {QUERY: file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def file_with(name: str, content: bytes) -> Callable[[Path], None]:
    """Replace a file."""
    return lambda folder: (folder / name).write_bytes(content) and None


MODELS = [
    ("a weight with NaN", weight_with(float("nan")), repr(QUERY)),
    ("a weight with inf", weight_with(float("inf")), repr(QUERY)),
    ("an index that leads out", index_to("../elsewhere.safetensors"), "'../elsewhere.safetensors'"),
    ("an index with a full path", index_to("/etc/passwd"), "'/etc/passwd'"),
    ("config.json nested 100,000 deep", file_with("config.json", b"[" * 100_000), "config.json"),
    ("config.json of a list", file_with("config.json", b"[]"), "config.json"),
    ("config.json of garbage", file_with("config.json", b"\xff\xfe\0"), "config.json"),
    ("no heads", config_with(num_attention_heads=0), "num_attention_heads"),
    ("10**9 layers", config_with(num_hidden_layers=10**9), "num_hidden_layers"),
    ("a width in quotes", config_with(hidden_size="64"), "hidden_size"),
    ("tokenizer.json of garbage", file_with("tokenizer.json", b"garbage"), "tokenizer"),
    ("weights of garbage", file_with("model.safetensors", b"\xff" * 1000), "model.safetensors"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "part"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_a_damaged_model(damage: Callable[[Path], None], part: str, small_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_bert, folder)
    damage(folder)
    command = [*COMMAND, "serve", str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    errors = [line for line in done.stderr.splitlines() if " ERROR " in line or line.startswith("penstock: error")]
    print(f"exit {done.returncode}: {errors}")
    assert done.returncode in (2, 3)
    assert "Traceback" not in done.stderr
    assert [part in line for line in errors] == [True]


@pytest.mark.slow
def test_a_long_folder_for_temporary_files(launch: Launch, tmp_path: Path) -> None:
    place = tmp_path / ("t" * 119)
    place.mkdir()
    server = launch(TMPDIR=str(place))
    assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "one"}, timeout=60).status_code == 200
    assert len(list(place.iterdir())) == 1
    server.process.terminate()
    server.process.wait(60)
    assert not list(place.iterdir())
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_batch_gives_what_each_text_gives_alone(launch: Launch, small_bert: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "embedding_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.ConvBertModel(transformers.ConvBertConfig(intermediate_size=96, head_ratio=2, **sizes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else weight.add_(0.3 * torch.randn_like(weight))
    shutil.copytree(small_bert, tmp_path / "convbert")
    model.save_pretrained(tmp_path / "convbert")
    server = launch(model=tmp_path / "convbert")
    texts = [" ".join(["word", "other", "third"][i % 3] for i in range(n)) for n in (3, 3, 4, 7, 8, 8, 9, 30, 33, 36)]

    def embed(inputs: list[str]) -> np.ndarray:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": inputs}, timeout=120).json()
        return np.array([row["embedding"] for row in answer["data"]])

    together, alone = embed(texts), np.concatenate([embed([text]) for text in texts])
    difference = np.abs(together - alone).max()
    print(f"ConvBERT through transformers: a batch is off by {difference:.1e} from its texts alone")
    assert difference <= 1e-5
    assert "sequences of equal length alone share a forward" in server.log.read_text()
