"""HTTP in, HTTP out: the command line, the routes and their schemas. Knows no torch."""

from importlib.metadata import PackageNotFoundError, version


def penstock_version() -> str:
    """Returns the version of the installed distribution, or "0+unknown" in a checkout that is not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"
