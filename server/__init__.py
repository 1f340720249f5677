"""The HTTP server: command line, routes and schemas. It does not import torch."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def penstock_version() -> str:
    """Returns the version of the installed distribution, or "0+unknown" if it is not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"
