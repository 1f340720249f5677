"""Draws a result of compare_peers.py as the bars of README.md, an SVG without a background for light and dark pages.

`.venv/bin/python benchmarks/plot_servers.py benchmarks/results/NAME.json > docs/images/servers.svg`
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {"vllm": "vLLM (CPU)", "infinity": "Infinity", "tei": "TEI"}
OTHER, FIRST, TEXT = "#8b949e", "#2f81f7", "#848d97"
"""Colours with enough contrast on white and on black."""
PANEL_WIDTH, ROW, LABEL, BAR = 370, 22, 80, 190


def main() -> None:
    """Prints the SVG of the servers in a result; results of libraries in process are left out."""
    report = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    servers = [name for name, facts in report["peers"].items() if facts["over"] == "HTTP"]
    panel_height = ROW * (len(servers) + 2)
    loads = list(report["loads"].values())
    height = panel_height * ((len(loads) + 1) // 2)
    alt = f"texts per second of {', '.join(servers)} on {report['machine']['cpu']}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL_WIDTH} {height}" role="img" '
        f'aria-label="{alt}" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">'
    )
    lines = [head]
    for number, load in enumerate(loads):
        row, column = divmod(number, 2)
        lines += [f'<g transform="translate({column * PANEL_WIDTH} {row * panel_height})">']
        lines += panel(load, servers)
        lines += ["</g>"]
    sys.stdout.write("\n".join([*lines, "</svg>"]) + "\n")


def panel(load: dict[str, Any], servers: list[str]) -> Iterator[str]:
    """Yields the title and one bar for each server: texts per second, the longest bar for the fastest server."""
    rates = {name: load["sides"][name]["median_texts_per_s"] for name in servers if name in load["sides"]}
    yield f'<text y="15" font-weight="600">{load["about"]}</text>'
    for number, (name, rate) in enumerate(rates.items()):
        y, width = 24 + number * ROW, BAR * rate / max(rates.values())
        yield f'<text x="{LABEL - 6}" y="{y + 13}" text-anchor="end">{NAMES.get(name, name)}</text>'
        colour = OTHER if number else FIRST
        yield f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{ROW - 4}" rx="2" fill="{colour}"/>'
        yield f'<text x="{LABEL + width + 6:.1f}" y="{y + 13}">{rate:.0f} texts/s</text>'


if __name__ == "__main__":
    main()
