"""Texts, images and both together in one prompt over HTTP, compared with transformers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..engine.images.pictures import data_uri, picture
from ..random_models import save_page_model, save_qwen3_vl_model
from ..servers import Server

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = "<|im_start|>system\nRepresent the user's input.<|im_end|>\n"
IMAGES = [picture(*size) for size in (("RGB", 21, 30), ("L", 17, 61), ("RGBA", 9, 8))]
URIS = [data_uri(image) for image in IMAGES]


def rgb(image: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.image_transforms.convert_to_rgb(image)


def chat(text: str) -> str:
    return f"{SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def rows(response: Any, *path: str) -> np.ndarray:
    assert response.status_code == 200, response.text
    data = response.json()
    for key in path or ("data",):
        data = data[key]
    return np.array([row["embedding"] if isinstance(row, dict) else row for row in data])


def test_qwen3_vl_embeddings_equal_transformers(
    launch: Callable[..., Server], default_model: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    model, arguments = save_qwen3_vl_model(tmp_path, default_model)

    def vector(prompt: str, *images: int) -> np.ndarray:
        with torch.no_grad():
            inputs = arguments(prompt, [rgb(IMAGES[i]) for i in images])
            row = model.model(**inputs).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(row, dim=0).numpy()

    cases: list[tuple[Any, np.ndarray]] = [
        ("A dam.", vector(chat("A dam."))),
        *(({"image": URIS[i]}, vector(chat(IMAGE_TEXT), i)) for i in range(3)),
        ({"image": URIS[1], "text": "a gate"}, vector(chat(IMAGE_TEXT + "a gate"), 1)),
    ]
    inputs, expected = [item for item, _ in cases], np.stack([row for _, row in cases])
    server = launch(str(tmp_path), "--dtype", "float32", "--cache", "1MB")

    def embed(some: list[Any], **fields: Any) -> np.ndarray:
        return rows(server.post("/v1/embeddings", {"input": some, **fields}))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(embed, [*([item] for item in inputs), inputs, inputs[::-1], inputs]))
    for vectors in (np.concatenate(found[: len(inputs)]), found[-3], found[-2][::-1], found[-1]):
        assert np.abs(vectors - expected).max() < TOLERANCE

    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": URIS[2]}}]
    parts += [{"type": "text", "text": " and "}, {"type": "image_url", "image_url": {"url": URIS[0]}}]
    prompt = f"<|im_start|>user\nsee {IMAGE_TEXT} and {IMAGE_TEXT}<|im_end|>\n"
    messages = [{"role": "user", "content": parts}]
    chats = rows(server.post("/v1/embeddings", {"messages": messages, "add_special_tokens": True}))
    assert np.abs(chats - vector(prompt, 2, 0)).max() < TOLERANCE
    pooled = server.post("/pooling", {"messages": messages, "add_special_tokens": True})
    assert pooled.json()["usage"]["prompt_tokens"] > 20
    assert np.abs(np.array(pooled.json()["data"][0]["data"]) - chats).max() < TOLERANCE

    mixed = vector(chat(f"see {IMAGE_TEXT} and {IMAGE_TEXT}"), 2, 0)
    cohere = server.post("/v2/embed", {"inputs": [{"content": parts}], "embedding_types": ["float"]})
    assert np.abs(rows(cohere, "embeddings", "float") - mixed).max() < TOLERANCE
    voyage_parts = [{"type": "text", "text": "see "}, {"type": "image_base64", "image_base64": URIS[2]}]
    voyage_parts += [{"type": "text", "text": " and "}, {"type": "image_base64", "image_base64": URIS[0]}]
    voyage = server.post("/v1/multimodalembeddings", {"inputs": [{"content": voyage_parts}]})
    assert np.abs(rows(voyage) - mixed).max() < TOLERANCE
    instructed = chat("A dam.").replace("Represent the user's input.", "Find dams.")
    assert np.abs(embed(["A dam."], instruction="Find dams") - vector(instructed)).max() < TOLERANCE

    # Only the text is truncated, at either end, and token ids have no prompt.
    limit = arguments(chat(""), [])["input_ids"].shape[1] + 2
    words = "dam gate river wall"
    for side, left in (("left", "river wall"), ("right", "dam gate")):
        found = embed([words], truncate_prompt_tokens=limit, truncation_side=side)
        assert np.abs(found - vector(chat(left))).max() < TOLERANCE
    assert embed([[5] * limit], truncate_prompt_tokens=limit).shape == expected[:1].shape

    scored = server.post("/v1/rerank", {"query": "A dam.", "documents": inputs[1:]}).json()["results"]
    scores = {row["index"]: row["relevance_score"] for row in scored}
    assert np.abs([scores[i] for i in range(4)] - expected[1:] @ expected[0]).max() < TOLERANCE

    rejected = server.post("/v1/embeddings", {"input": ["a", {"image": data_uri(IMAGES[0].resize((4000, 8)))}]})
    assert rejected.status_code == 400
    assert "input[1].image has 4000 x 8 pixels" in rejected.text
    server.stop()


@pytest.mark.slow
def test_pages_over_http_equal_transformers(launch: Callable[..., Server], default_model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, processor = save_page_model(tmp_path, "ColModernVBert", default_model)
    with torch.no_grad():
        pages = [model(**processor.process_images(images=[rgb(image)])).embeddings[0].numpy() for image in IMAGES]
        query = model(**processor.process_queries(text=["A dam."])).embeddings[0].numpy()
    expected = np.array([(query @ page.T).max(axis=1).sum() for page in pages])
    server = launch(str(tmp_path), "--dtype", "float32")
    documents = [{"image": each} for each in URIS]
    found = server.post("/v1/multi-vector", {"input": [*documents, "A dam."]})
    assert found.status_code == 200, found.text
    for row, wanted in zip(found.json()["data"], [*pages, query], strict=True):
        assert np.abs(np.array(row["embeddings"]) - wanted).max() < TOLERANCE
    pooled = server.post("/pooling", {"input": documents[:1], "task": "token_embed"})
    assert np.abs(np.array(pooled.json()["data"][0]["data"]) - pages[0]).max() < TOLERANCE
    encoded = server.post("/v1/encode", {"input": [*documents, "A dam."], "return_token_ids": True}).json()["data"]
    assert "patches" not in encoded[-1]
    for row, (height, width) in zip(encoded, ((84, 84), (84, 28), (84, 84)), strict=False):  # tiles of 28 pixels
        assert (row["patches"]["rows"], row["patches"]["columns"]) == (height // 14, width // 14)
        assert max(row["patches"]["vectors"]) < len(row["multi_vector"])
    parts = [{"content": [{"type": "image_url", "image_url": {"url": each}}]} for each in URIS]
    scored = server.post("/score", {"queries": "A dam.", "documents": parts})
    assert np.abs([row["score"] for row in scored.json()["data"]] - expected).max() < 10 * TOLERANCE
    ranked = server.post("/rerank", {"query": {"image": URIS[0]}, "documents": ["A dam.", documents[0]]})
    assert ranked.status_code == 200, ranked.text
    assert [row["index"] for row in ranked.json()["results"]] == [1, 0]
    mixed = server.post("/v1/multi-vector", {"input": [{"image": URIS[0], "text": "a gate"}]})
    assert mixed.status_code == 400
    assert "Send them as separate inputs" in mixed.text
    server.stop()
