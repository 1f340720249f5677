"""LoRA adapters over HTTP: named by requests, different rows of one model, chunks, caches, and wrong folders."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from ..engine.executors.adapters import save_adapter
from ..servers import Server

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = ["What holds back the water?", *("The gate of the dam lets water through. " * n for n in (1, 3, 9)), "x"]
SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def models(random_model: Callable[..., Path], tmp_path_factory) -> tuple[Path, list[str], dict[str, np.ndarray]]:
    """A decoder, the values of --adapter, and the embeddings of TEXTS by served name."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, adapters = random_model("Qwen3Model", **SIZES), tmp_path_factory.mktemp("adapters")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    named = {"m": model}
    for seed, (name, pattern) in enumerate({"legal": r".*_proj", "medical": r".*(q|up)_proj|embed_tokens"}.items()):
        named[f"m:{name}"] = save_adapter(adapters / name, model, pattern, seed)
    expected = {}
    with torch.no_grad():
        for name, each in named.items():
            rows = [each(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
            expected[name] = torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()
    return folder, [f"{name}={adapters / name}" for name in ("legal", "medical")], expected


def embed(server: Server, name: str, texts: list[str], **fields: object) -> np.ndarray:
    response = server.post("/v1/embeddings", {"model": name, "input": texts, **fields})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == name or "lora_path" in fields
    return np.array([row["embedding"] for row in response.json()["data"]])


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_requests_of_several_adapters_equal_merged_weights(launch, models, kernels: str) -> None:
    folder, adapters, expected = models
    flags = ("--served-model-name", "m", "--dtype", "float32", "--cpu-kernels", kernels, "--chunk-size", "16")
    given = [word for entry in adapters for word in ("--adapter", entry)]
    server = launch(str(folder), *flags, *given, "--cache", "1MB")
    calls = [(name, [text]) for text in TEXTS for name in expected] + [(name, TEXTS) for name in expected]
    for _ in range(2):  # the second time from the caches of vectors and prefixes
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda each: embed(server, *each), calls))
        for (name, texts), vectors in zip(calls, results, strict=True):
            wanted = expected[name][[TEXTS.index(text) for text in texts]]
            assert np.abs(vectors - wanted).max() < 1e-5, (name, texts)
    assert np.abs(expected["m"] - expected["m:legal"]).max() > 0.01
    assert np.array_equal(embed(server, "m", TEXTS, lora_path="legal"), embed(server, "m:legal", TEXTS))
    cards = {card["id"]: card["parent"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards == {"m": None, "m:legal": "m", "m:medical": "m"}
    unknown = server.post("/v1/embeddings", {"model": "m:tax", "input": "a"})
    assert unknown.status_code == 404
    assert "m has no LoRA adapter 'tax'; it has: legal, medical." in unknown.text
    server.stop()
