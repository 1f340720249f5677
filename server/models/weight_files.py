"""The weight files of a model folder: size and number of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, NamedTuple

from penstock.engine.checkpoint.files import read_header
from penstock.engine.model_files.model_folder import is_gguf
from penstock.engine.protocol.errors import WeightError

_PACKED_VALUES: Final = 4
"""Values in a word of a packed weight of compressed-tensors."""
_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class WeightSummary(NamedTuple):
    """The size and the number of parameters of a model, from the sizes and headers of its files.

    Attributes:
        num_bytes: Size of the weight files; 0 without such files.
        num_parameters: Number of parameters in the headers of safetensors files; 0 without such files.
        modified_s: Unix time of the newest file, or of the folder if it has no weight files.
        format: gguf, safetensors or pytorch; empty without weight files.
    """

    num_bytes: int
    num_parameters: int
    modified_s: float
    format: str

    @classmethod
    def of(cls, folder: str, headers: WeightHeaderCache | None = None) -> WeightSummary:
        """Returns the size, parameter count and modification time of the weights in a folder and its module folders.

        A damaged file counts with its size and no parameters. The engine reports the damage when it loads the model.

        Args:
            folder: Folder of the model, or its GGUF file.
            headers: Cache of the file headers. None reads all headers.

        Raises:
            OSError: The folder cannot be read.
        """
        headers = headers or WeightHeaderCache()
        root = Path(folder)
        tensors = [root] if root.is_file() else sorted(filter(Path.is_file, root.rglob("*.safetensors")))
        files = tensors or sorted(filter(Path.is_file, (*root.glob("*.bin"), *root.glob("*.pt"))))
        stats = [path.stat() for path in files] or [root.stat()]
        num_bytes = sum(stat.st_size for stat in stats) if files else 0
        file_format = "gguf" if is_gguf(root) else "safetensors" if tensors else "pytorch" if files else ""
        num_parameters = sum(map(headers.num_parameters, tensors))
        return cls(num_bytes, num_parameters, max(stat.st_mtime for stat in stats), file_format)

    def bytes_by_dtype(self) -> dict[str, int]:
        """Returns the bytes of the loaded weights by dtype; empty if no header declares a dtype."""
        return {dtype: self.num_parameters * size for dtype, size in _SIZES.items()} if self.num_parameters else {}


class WeightHeaderCache:
    """Caches headers of safetensors and GGUF files until a file changes. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int, int], int]] = {}

    def num_parameters(self, path: Path) -> int:
        """Returns the number of parameters in the header of a file; 0 for a damaged file. Raises OSError."""
        stat = path.stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        seen = self._seen.get(path)
        if seen is None or seen[0] != version:
            seen = self._seen[path] = version, _num_parameters(path)
        return seen[1]


def _num_parameters(path: Path) -> int:
    """Returns the number of parameters in the header of a file; 0 for a damaged file."""
    try:
        if is_gguf(path):
            # `penstock --help` imports this module, but must not load numpy.
            from penstock.engine.model_files.gguf import read_gguf

            return sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
        entries = read_header(path).items()
        return sum(
            math.prod(entry.shape) * (_PACKED_VALUES if name.endswith("_packed") else 1) for name, entry in entries
        )
    except WeightError:
        return 0
