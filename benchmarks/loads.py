"""The loads of the server benchmarks: the requests and their concurrency."""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WORDS = (Path(__file__).parents[1] / "server" / "bench" / "words.txt").read_text().split()


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of traffic.

    Attributes:
        name: Name in tables.
        min_words: Words of the shortest text.
        max_words: Words of the longest text.
        texts_per_request: Texts in one request.
        concurrency: Requests under way at once.
    """

    name: str
    min_words: int
    max_words: int
    texts_per_request: int
    concurrency: int

    def bodies(self, model: str, encoding_format: str, count: int = 256, seed: int = 0) -> list[bytes]:
        """Returns `count` request bodies of /v1/embeddings, the same for the same seed."""
        return [request_body(texts, model, encoding_format) for texts in self.requests(count, seed)]

    def requests(self, count: int = 256, seed: int = 0) -> list[list[str]]:
        """Returns the texts of `count` requests, the same for the same seed."""
        rng = random.Random(f"{self.name}-{seed}")
        return [[self._text(rng) for _ in range(self.texts_per_request)] for _ in range(count)]

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(self.min_words, self.max_words)))


class ImageLoad(Load):
    """Instead of texts photos of 640 x 480 pixels, as data URIs of JPEG files: crops of scikit-learn's two photos."""

    __slots__ = ()

    def _text(self, rng: random.Random) -> str:
        return rng.choice(_photos())


_NUM_PHOTOS = 64


@cache
def _photos() -> list[str]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    rng = random.Random("photos")
    photos = []
    for number in range(_NUM_PHOTOS):
        image = originals[number % len(originals)]
        scale = rng.uniform(0.4, 1.0)
        width, height = round(image.width * scale), round(image.width * scale * 0.66)
        left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
        file = io.BytesIO()
        image.crop((left, top, left + width, top + height)).resize((640, 480)).save(file, "JPEG", quality=90)
        photos.append("data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode())
    return photos


def request_body(texts: list[str], model: str, encoding_format: str) -> bytes:
    """Returns the body of /v1/embeddings that asks for `texts`, which may be data URIs of images."""
    body = {"model": model, "input": texts, "encoding_format": encoding_format}
    if texts[0].startswith("data:image/"):
        body["modality"] = "image"  # Infinity's name, which penstock accepts too
    return json.dumps(body).encode()


LOADS = {
    load.name: load
    for load in (
        Load("query", 5, 15, 1, 16),
        Load("mixed", 5, 150, 32, 4),
        Load("long", 200, 200, 8, 4),
        Load("single", 5, 15, 1, 1),
    )
}
