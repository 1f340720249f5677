"""Measures penstock on a CUDA device, phase by phase, and says which goals are met.

    python benchmarks/measure_gpu.py                                   # all phases; `make bench-gpu` sets its paths
    python benchmarks/measure_gpu.py --phases kernels --output results
    python benchmarks/measure_gpu.py --device cpu --tiny               # tries the code where there is no GPU

Each phase is a process with a time limit of its own. What it has found is in the JSON file when it ends, however it
ends, and the next phase begins.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
PARTS: Final = {"phase": "gpu.phases", "client": "gpu.client"}
"""What this program is besides: one phase, and one of the processes that ask a server."""


def load(module: str) -> ModuleType:
    """Imports a module of this folder, which is on the path meanwhile and no longer.

    It holds a folder `kernels`, and transformers takes one that can be imported for a package that it knows.
    """
    sys.path.insert(0, str(FOLDER))
    try:
        for name in ("loads", "processes", "servers"):
            importlib.import_module(name)
        return importlib.import_module(module)
    finally:
        sys.path.remove(str(FOLDER))


if __name__ == "__main__":
    part = sys.argv[1] if sys.argv[1:] and sys.argv[1] in PARTS else None
    if part is None:
        sys.exit(load("gpu.run").main(sys.argv[1:], __doc__))
    load(PARTS[part]).main(sys.argv[2:])
