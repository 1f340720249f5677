"""Print what an image installs beside penstock itself: its dependencies as pyproject.toml names them, and extras."""

import re
import sys
import tomllib
from pathlib import Path

# The native kernels run encoders without these; everything else runs on torch, and transformers knows its forms.
TORCH_PATH = ("torch", "transformers")
# What flags of `penstock serve` need: --cache-dir, --otlp-traces-endpoint.
EXTRAS = ("cache", "otel")


def requirements(project: dict, *, slim: bool) -> list[str]:
    """Return the requirements of a `[project]` table, with EXTRAS; a slim image has no torch."""
    wanted = project["dependencies"] + [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    return [one for one in wanted if not (slim and re.match(r"[\w.-]+", one)[0] in TORCH_PATH)]


def main(arguments: list[str]) -> int:
    """Print them, one a line: `python docker/requirements.py [slim]`, at the root of the checkout."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    print(*requirements(project, slim="slim" in arguments), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
