"""Makes the benchmarks' modules known to their tests.

They are scripts that find each other in their own folder. It is on the path while they are imported and no longer: one
holds a folder `kernels`, a name under which nothing may be importable.
"""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

for folder, names in (
    (BENCHMARKS, ("compare_peers", "compare_servers", "conditions", "overlap", "gpu.run", "processes", "summary")),
    (BENCHMARKS / "quality", ("compare_types",)),
):
    sys.path.insert(0, str(folder))
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def free_port() -> int:
    """A port on which nobody listens now."""
    return int(importlib.import_module("peers.catalogue").free_port())
