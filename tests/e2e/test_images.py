"""Images and texts of CLIP, SigLIP and SigLIP 2 over HTTP, compared with transformers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ..engine.images.pictures import data_uri, picture
from ..random_models import TWO_TOWERS, save_two_tower_model
from ..servers import Server

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-5
TEXTS = ["A dam holds back water.", "gate"]
SIZES = [("RGB", 28, 28), ("L", 17, 61), ("P", 90, 9), ("RGB", 40, 1), ("RGBA", 32, 33)]
IMAGES = [picture(*size) for size in SIZES]


class Reference(NamedTuple):
    """A saved model, and the normalised vectors of transformers for the images and TEXTS."""

    folder: Path
    images: np.ndarray
    texts: np.ndarray


@pytest.fixture(scope="module", params=TWO_TOWERS)
def reference(request, tmp_path_factory, default_model: Path) -> Reference:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, folder = request.param, tmp_path_factory.mktemp("images")
    model, processor = save_two_tower_model(folder, kind, default_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # SigLIP 2 has a tokenizer of its own
    pads = {} if kind == "CLIP" else {"padding": "max_length", "max_length": 64}
    with torch.no_grad():
        colours = [transformers.image_transforms.convert_to_rgb(image) for image in IMAGES]
        images = model.get_image_features(**processor(colours, return_tensors="pt")).pooler_output
        ids = [tokenizer(text, return_tensors="pt", **pads).input_ids for text in TEXTS]
        texts = torch.cat([model.get_text_features(input_ids=each).pooler_output for each in ids])
    normalized = [torch.nn.functional.normalize(each, dim=1).numpy() for each in (images, texts)]
    return Reference(folder, *normalized)


def embed(server: Server, inputs: list[Any]) -> np.ndarray:
    response = server.post("/v1/embeddings", {"input": inputs})
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]])


def test_images_and_texts_equal_transformers_in_every_batch(
    launch: Callable[..., Server], reference: Reference
) -> None:
    server = launch(str(reference.folder), "--dtype", "float32", "--cache", "1MB")
    images = [{"image": data_uri(image)} for image in IMAGES]
    texts = [{"text": text} for text in TEXTS]
    mixed = [item for pair in zip(images, [*texts, *texts, *texts], strict=False) for item in pair]
    calls = [*([item] for item in images), images, texts, mixed, images[::-1]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda inputs: embed(server, inputs), calls))
    alone = np.concatenate(found[: len(images)])
    assert np.abs(alone - reference.images).max() < TOLERANCE
    assert np.abs(found[-3] - reference.texts).max() < TOLERANCE
    assert np.array_equal(found[-4], alone)
    assert np.array_equal(found[-2][::2], alone)
    assert np.array_equal(found[-1], alone[::-1])

    ranked = server.post("/v1/rerank", {"query": TEXTS[0], "documents": [*images, *texts[1:]]})
    assert ranked.status_code == 200, ranked.text
    scores = {row["index"]: row["relevance_score"] for row in ranked.json()["results"]}
    vectors = np.concatenate([reference.images, reference.texts[1:]])
    expected = vectors @ reference.texts[0]
    assert np.abs([scores[i] for i in range(len(scores))] - expected).max() < TOLERANCE
    whole = server.post("/v1/rerank", {"query": "gate", "documents": images, "max_chunks_per_doc": 3})
    assert whole.status_code == 200, whole.text

    too_long = server.post("/v1/embeddings", {"input": [images[0], texts[0], images[1], {"text": "gate " * 900}]})
    assert too_long.status_code == 400
    assert "input 3 has" in too_long.json()["error"]["message"]

    for image, message in (
        ("data:image/png;base64,aGVsbG8=", "input[1].image is not an image in a supported format"),
        (data_uri(IMAGES[0])[:-40] + "AAAA", "input[1].image "),
    ):
        rejected = server.post("/v1/embeddings", {"input": [texts[0], {"image": image}, images[0]]})
        assert rejected.status_code == 400
        assert message in rejected.text
    num_images = server.metric("penstock_images_total")
    assert num_images >= server.metric("penstock_engine_images_total") > 0  # others were in the cache
    assert server.metric("penstock_image_decoding_seconds_total") > 0
    assert server.metric("penstock_image_failures_total") == 2
    server.stop()
