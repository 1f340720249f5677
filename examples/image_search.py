"""Image search: find the original of a mirrored, cropped or shrunken picture among 20 pictures of scikit-image.

The model is a CLIP with random weights (data/random_clip.py): it compares colours and coarse shapes, so it finds
near-duplicates but no meanings, and texts find nothing. With a trained CLIP or SigLIP the requests are the same.

    python examples/data/random_clip.py random-clip all-MiniLM-L6-v2   # local folders
    penstock serve random-clip
    python examples/image_search.py
"""

import base64
import io
import sys
from pathlib import Path

import httpx
import numpy as np
import skimage
from PIL import Image, ImageOps

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
FOLDER = Path(skimage.__file__).parent / "data"
NAMES = [
    "astronaut", "brick", "camera", "cell", "chelsea", "clock_motion", "coffee", "coins", "color", "grass", "gravel",
    "horse", "hubble_deep_field", "ihc", "moon", "motorcycle_left", "page", "retina", "rocket", "text",
]  # fmt: skip
CHANGES = {
    "shrunken": lambda picture: picture.resize((picture.width // 2, picture.height // 2)),
    "mirrored": ImageOps.mirror,
    "cropped": lambda picture: ImageOps.crop(picture, int(0.07 * min(picture.size))),
}


def embed(pictures: list[Image.Image]) -> np.ndarray:
    """Returns a unit vector of each picture."""
    files = [io.BytesIO() for _ in pictures]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file, "PNG")
    images = [{"image": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"} for file in files]
    answer = httpx.post(f"{URL}/v1/embeddings", json={"model": "random-clip", "input": images}, timeout=60)
    return np.array([row["embedding"] for row in answer.raise_for_status().json()["data"]])


pictures = [Image.open(next(FOLDER.glob(f"{name}.*"))).convert("RGB") for name in NAMES]
index = embed(pictures)
print("The weights are random: this shows the requests, not the quality of a trained model.")
for change, change_picture in CHANGES.items():
    found = (embed([change_picture(picture) for picture in pictures]) @ index.T).argmax(axis=1)
    wrong = [f"{NAMES[i]} as {NAMES[best]}" for i, best in enumerate(found) if i != best]
    print(f"{change}: {len(NAMES) - len(wrong)} of {len(NAMES)} found first; wrong: {', '.join(wrong) or 'none'}")
    assert len(wrong) <= 3
