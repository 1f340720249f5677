"""Draws the latency of a load test against its throughput, with matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..settings import UsageError
from .report import Result

_SHARES: Final = {"p50": (0.5, "-"), "p90": (0.9, "--"), "p99": (0.99, ":")}
"""Share of the requests and style of the line of each percentile."""
_COLOURS: Final = ("#00796b", "#e65100")
_INCHES: Final = (8.0, 5.0)


def check_plot(file: Path) -> None:
    """Checks that a plot can be written, before a load test begins.

    Raises:
        UsageError: matplotlib is missing, the folder does not exist, or the suffix is not that of an image.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"--plot: needs matplotlib; run `pip install 'penstock[plot]'` ({error})") from error
    known = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix.lstrip(".").lower() not in known:
        raise UsageError(f"--plot: the name of the file must end with one of .{', .'.join(known)} (got {file})")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot: the folder {file.parent} does not exist")


def plot(results: Sequence[Result], names: Mapping[str, str], title: str, file: Path) -> None:
    """Writes an image: a colour for each server, a line style for each percentile, a mark for each load.

    Args:
        results: At least one with a successful request. Results without one are left out.
        names: Name of each URL in the legend.
        title: Above the axes.
        file: Its suffix gives the format, such as .png.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for colour, url in zip(_COLOURS, names, strict=False):
        of_server = [result for result in results if result.url == url and result.total.latencies_s]
        throughputs = [result.total.texts_per_s for result in of_server]
        for share, style in _SHARES.values():
            latencies = [result.total.latency_ms(share) for result in of_server]
            axes.plot(throughputs, latencies, style, color=colour, marker="o", markersize=4)
        for result, throughput in zip(of_server, throughputs, strict=True):
            place = throughput, result.total.latency_ms(max(share for share, _ in _SHARES.values()))
            axes.annotate(
                _load(result), place, (0, 5), textcoords="offset points", ha="center", fontsize=8, color=colour
            )
    rates = any(result.point.rate is not None for result in results)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("texts per second")
    axes.set_ylabel("latency in ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # labels only in a range below 10 to 1
    axes.set_xlim(left=0)
    axes.grid(visible=True, which="both", linewidth=0.4, alpha=0.5)
    styles = [axes.plot([], [], style, color="black", label=label)[0] for label, (_, style) in _SHARES.items()]
    numbers = "numbers: requests/s" if rates else "numbers: connections"
    axes.legend(handles=styles, fontsize=8, title=numbers, title_fontsize=8)
    servers = [
        axes.plot([], [], "o-", color=colour, markersize=4, label=name)[0]
        for colour, name in zip(_COLOURS, names.values(), strict=False)
    ]
    figure.legend(handles=servers, loc="outside lower left", fontsize=8, frameon=False)
    figure.savefig(file, dpi=150)


def _load(result: Result) -> str:
    return f"{result.point.connections if result.point.rate is None else result.point.rate:g}"
