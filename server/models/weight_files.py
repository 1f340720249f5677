"""The weight files of a model folder: their size, and how many parameters their headers declare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, NamedTuple

from penstock.engine.checkpoint.files import read_header
from penstock.engine.protocol.errors import WeightError

_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class WeightFiles(NamedTuple):
    """What is known of a model's weights without reading them.

    Attributes:
        num_bytes: Bytes of all files.
        num_parameters: Numbers that the headers of safetensors files declare; 0 where there are none.
        modified_s: Unix time of the newest file; that of the folder where there are none.
    """

    num_bytes: int
    num_parameters: int
    modified_s: float

    @classmethod
    def of(cls, folder: str, headers: WeightHeaders | None = None) -> WeightFiles:
        """Returns the size, parameter count and age of the weights in a folder, with those of modules below it.

        A damaged file counts with its size and no parameters: the engine names the damage when it loads the model.

        Args:
            folder: Of the model.
            headers: Cache of the file headers. None reads all headers.

        Raises:
            OSError: The folder cannot be read.
        """
        headers = headers or WeightHeaders()
        root = Path(folder)
        tensors = sorted(filter(Path.is_file, root.rglob("*.safetensors")))
        files = tensors or sorted(filter(Path.is_file, (*root.glob("*.bin"), *root.glob("*.pt"))))
        stats = [path.stat() for path in files] or [root.stat()]
        num_bytes = sum(stat.st_size for stat in stats) if files else 0
        return cls(num_bytes, sum(map(headers.num_parameters, tensors)), max(stat.st_mtime for stat in stats))

    def memory(self) -> dict[str, int]:
        """Returns the Bytes that the weights take once they are loaded, by dtype; empty where none are declared."""
        return {dtype: self.num_parameters * size for dtype, size in _SIZES.items()} if self.num_parameters else {}


class WeightHeaders:
    """Reads the header of a safetensors file again only if the file has changed. Safe to use from many threads."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int, int], int]] = {}

    def num_parameters(self, path: Path) -> int:
        """Returns the numbers in a file, by its header; 0 for a damaged file. Raises OSError."""
        stat = path.stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        seen = self._seen.get(path)
        if seen is None or seen[0] != version:
            seen = self._seen[path] = version, _num_parameters(path)
        return seen[1]


def _num_parameters(path: Path) -> int:
    """Returns the numbers in a safetensors file by its header; 0 for a damaged file."""
    try:
        return sum(math.prod(entry.shape) for entry in read_header(path).values())
    except WeightError:
        return 0


def short_count(count: int) -> str:
    """Returns 22.7M for 22,713,216."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
