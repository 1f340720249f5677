"""Imports the modules of the benchmarks.

Benchmarks are scripts that import each other from their own folder. It is on the path only during this import, because
it has a folder `kernels`, and a bare module `kernels` must not be importable.
"""

import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

for folder, names in (
    (BENCHMARKS, ("compare_peers", "compare_servers", "conditions", "gpu.run", "processes", "summary")),
    (BENCHMARKS / "quality", ("compare_types",)),
):
    sys.path.insert(0, str(folder))
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
