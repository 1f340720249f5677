"""The HTTP server: command line, routes and schemas. It does not import torch."""

from importlib.metadata import PackageNotFoundError, version


def penstock_version() -> str:
    """Returns the version of the installed distribution, or "0+unknown" if it is not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"
