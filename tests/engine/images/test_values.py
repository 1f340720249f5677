"""Images as values of rows: bytes, data URIs and paths."""

import os
import re
from pathlib import Path

import pytest

from penstock.engine.images.values import ImageValueError, read_image_value

_PNG = "data:image/png"


def test_image_is_read_from_each_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"x")
    for value in (b"x", {"bytes": b"x"}, {"bytes": "eA=="}, f"{_PNG};base64,eA==", f"{_PNG.upper()};Base64,e\nA=="):
        assert read_image_value(value, tmp_path) == b"x"
    for value in ("a.png", str(path), Path("a.png"), {"path": "a.png"}, {"bytes": b"", "path": "a.png"}):
        assert read_image_value(value, tmp_path) == path
    os.truncate(path, 1 << 28)
    assert read_image_value("a.png", tmp_path) == path
    os.truncate(path, (1 << 28) + 1)
    with pytest.raises(ImageValueError, match=r"has 'a\.png', which is larger than 256 MiB"):
        read_image_value("a.png", tmp_path)


def test_value_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    no_file = ("b.png", "empty.png", "a\0b", str(tmp_path))
    for value, message in (
        *((value, "has no image: neither") for value in (b"", "", 5, None, {}, {"path": ""})),
        *((name, f"has {name[:100]!r}, which is no file, or an empty one") for name in (*no_file, "x" * 5_000)),
        *((uri, "data URI without base64") for uri in (f"{_PNG},eA==", f"{_PNG};base64", f"{_PNG:x<256};base64,eA==")),
        (f"{_PNG};base64,e", "base64 is not valid"),
        (f"{_PNG};base64,", "data URI without data"),
        ("HTTPS://host/" + "a" * 200, "has the URL 'HTTPS://host/" + "a" * 87 + "'; download the images first"),
    ):
        with pytest.raises(ImageValueError, match=re.escape(message)):
            read_image_value(value, tmp_path)
