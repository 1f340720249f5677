"""Measures penstock on a CUDA device, phase by phase, and reports which goals are met.

    python benchmarks/measure_gpu.py                                   # all phases; `make bench-gpu` sets its paths
    python benchmarks/measure_gpu.py --phases kernels --output results
    python benchmarks/measure_gpu.py --device cpu --tiny               # tries the code where there is no GPU

Each phase is a process with its own time limit. Its results are in the JSON file even if it fails, and the next phase
starts.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
PARTS: Final = {"phase": "gpu.phases", "client": "gpu.client"}
"""Modules that this program runs in child processes: one phase, and one client of a server."""


def load(module: str) -> ModuleType:
    """Imports a module of this folder, which is on `sys.path` only during the import.

    The folder contains `kernels`. If it could be imported, transformers would use it as the package of that name.
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
