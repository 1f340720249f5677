"""Describes the machine of a measurement."""

from __future__ import annotations

import platform
from pathlib import Path


def machine() -> dict[str, str]:
    """Returns the platform, the processor and the Python version."""
    return {"platform": platform.platform(), "cpu": cpu_name(), "python": platform.python_version()}


def cpu_name() -> str:
    """Returns the number of processors and their model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{sum(line.startswith('processor') for line in lines)} x {name}"
