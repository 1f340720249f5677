"""The files of a checkpoint: how long one that is read from stays open."""

from __future__ import annotations

from pathlib import Path
from weakref import ref

import numpy as np

from penstock.engine.checkpoint.array_file import Array
from penstock.engine.checkpoint.files import Checkpoint

SIZES = {"small": 1 << 10, "large": 33 << 20}


class File:
    """Tensors of so many Bytes, which take no memory."""

    def keys(self) -> list[str]:
        return list(SIZES)

    def get_tensor(self, name: str) -> Array:
        return np.broadcast_to(np.zeros(1, np.uint8), SIZES[name])


def test_a_file_is_let_go_as_soon_as_much_was_read_of_it() -> None:
    opened: list[ref[File]] = []

    def open_file(path: Path) -> File:
        file = File()
        opened.append(ref(file))
        return file

    checkpoint = Checkpoint(dict.fromkeys(SIZES, Path("model.safetensors")), open_file)
    for _ in range(3):
        checkpoint.read("small")
    assert [file() is None for file in opened] == [False]
    tensor = checkpoint.read("large")
    assert tensor.nbytes == SIZES["large"]
    assert [file() is None for file in opened] == [True]
    checkpoint.read("small")
    assert [file() is None for file in opened] == [True, False]
    checkpoint.close()
    assert [file() is None for file in opened] == [True, True]
