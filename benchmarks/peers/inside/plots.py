"""Draws the plots of a result: runs in an environment with matplotlib and prints the names of the files.

python plots.py RESULT.json PATH/STEM
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 9, "axes.grid": True})

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

UNITS = {"concurrency": "requests under way at once", "length": "words a text"}


def main() -> None:
    """Draws the plots of a report."""
    report = json.loads(Path(sys.argv[1]).read_text())
    stem = Path(sys.argv[2])
    colours = {name: f"C{number}" for number, name in enumerate(report["peers"])}
    if report["loads"]:
        _save(_loads(report, colours), stem, "loads")
    for sweep, points in report["sweeps"].items():
        if points:
            _save(_sweep(sweep, points, colours), stem, sweep)
    _save(_facts(report, colours), stem, "facts")


def _save(figure: Any, stem: Path, name: str) -> None:
    path = stem.with_name(f"{stem.name}-{name}.svg")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path.name)


def _loads(report: dict[str, Any], colours: dict[str, str]) -> Any:
    """Throughput beside that of the first side, and share of the limit, by load."""
    figure, (rate, share) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True)
    loads = report["loads"]
    width = 0.8 / len(colours)
    first = next(iter(colours))
    for number, (name, colour) in enumerate(colours.items()):
        own = [(place, load["sides"][name]) for place, load in enumerate(loads.values()) if name in load["sides"]]
        x = [place + (number - (len(colours) - 1) / 2) * width for place, _ in own]
        is_comparable = [first in load["sides"] for load in loads.values()]  # not in a load that it failed in
        own_rates = [is_comparable[place] / facts["first_is_times_faster"] for place, facts in own]
        rate.bar(x, own_rates, width, color=colour, label=name)
        share.bar(x, [100 * facts["share_of_limit"] for _, facts in own], width, color=colour)
    rate.set(ylabel=f"texts/s, {first} = 1")
    share.set(ylabel="% of the machine's limit")
    share.set_xticks(range(len(loads)), list(loads))
    for axes in (rate, share):
        axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper center", ncols=len(colours), fontsize=8)
    return figure


def _sweep(sweep: str, points: dict[str, Any], colours: dict[str, str]) -> Any:
    """Throughput and latency against concurrency, or against length."""
    figure, (rate, latency) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, colour in colours.items():
        own = [(int(point), load["sides"][name]) for point, load in points.items() if name in load["sides"]]
        x = [point for point, _ in own]
        rate.plot(x, [facts["median_texts_per_s"] for _, facts in own], "o-", color=colour, label=name, ms=3)
        latency.plot(x, [facts["p50_ms"] for _, facts in own], "o-", color=colour, ms=3)
        latency.plot(x, [facts["p99_ms"] for _, facts in own], ":", color=colour)
    for axes, label in ((rate, "texts/s"), (latency, "ms: median, dotted: 99 %")):
        axes.set(xscale="log", yscale="log", xlabel=UNITS[sweep], ylabel=label)
        axes.set_xticks([int(point) for point in points], list(points))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=len(colours), fontsize=8)
    return figure


def _facts(report: dict[str, Any], colours: dict[str, str]) -> Any:
    """Seconds to ready, and memory."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axes, field, label in zip(panels, ("ready_s", "peak_mib"), ("seconds to ready", "peak MiB"), strict=True):
        own = [(name, facts[field]) for name, facts in report["peers"].items() if field in facts]
        bars = axes.barh([name for name, _ in own], [value for _, value in own], color=[colours[n] for n, _ in own])
        axes.bar_label(bars, padding=2)
        axes.invert_yaxis()
        axes.set(xlabel=label)
        axes.margins(x=0.15)
        axes.grid(visible=False, axis="y")
    return figure


if __name__ == "__main__":
    main()
