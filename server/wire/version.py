"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version


def penstock_version() -> str:
    """Returns the version, or "0+unknown" in a checkout that is not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "0+unknown"
