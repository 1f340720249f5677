"""Print what an image installs beside penstock itself: its dependencies as pyproject.toml names them, and extras."""

import sys
import tomllib
from pathlib import Path

EXTRAS = ("cache", "images", "otel")
"""For --cache-dir and --otlp-traces-endpoint of `penstock serve`."""


def requirements(project: dict, *, slim: bool) -> list[str]:
    """Return the requirements of a `[project]` table, with EXTRAS; an image that is not slim has the extra `torch`."""
    extras = EXTRAS if slim else (*EXTRAS, "torch")
    return project["dependencies"] + [one for extra in extras for one in project["optional-dependencies"][extra]]


def main(arguments: list[str]) -> int:
    """Print them, one a line: `python docker/requirements.py [slim]`, at the root of the checkout."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    print(*requirements(project, slim="slim" in arguments), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
