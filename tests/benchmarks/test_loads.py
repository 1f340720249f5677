"""Loads of the benchmarks of servers."""

import base64
import io
import json

import pytest
from loads import ImageLoad, Load, request_body


def test_texts_are_the_same_for_the_same_seed() -> None:
    load = Load("short", 5, 15, 2, 4)
    first, again, other = load.requests(3, seed=1), load.requests(3, seed=1), load.requests(3, seed=2)
    assert first == again != other
    assert all(5 <= len(text.split()) <= 15 for texts in first for text in texts)
    assert json.loads(request_body(first[0], "m", "float")) == {
        "model": "m",
        "input": first[0],
        "encoding_format": "float",
    }


def test_images_are_photos_in_data_uris() -> None:
    image_module = pytest.importorskip("PIL.Image")
    pytest.importorskip("sklearn")
    requests = ImageLoad("images", 0, 0, 3, 4).requests(2)
    assert requests == ImageLoad("images", 0, 0, 3, 4).requests(2)
    for uri in requests[0]:
        head, _, data = uri.partition(",")
        assert head == "data:image/jpeg;base64"
        assert image_module.open(io.BytesIO(base64.b64decode(data))).size == (640, 480)
    assert json.loads(request_body(requests[0], "m", "float"))["modality"] == "image"
