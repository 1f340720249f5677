"""Results of a load test as a table for a terminal, as JSON, and as a plot (matplotlib, extra `plot`)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..settings import UsageError
from .load_generator import Round

_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_BAR: Final = 24
"""Characters of the longest bar."""
_BUSY_CLIENT: Final = 0.8
"""Share of a core above which the load generator may limit the results."""


_LINES: Final = {"p50": (0.5, "-"), "p90": (0.9, "--"), "p99": (0.99, ":")}
"""Share of the requests and style of the line of each percentile."""
_COLOURS: Final = ("#00796b", "#e65100")
_INCHES: Final = (8.0, 5.0)


class LoadPoint(NamedTuple):
    """One load of a sweep.

    Attributes:
        connections: Maximum number of concurrent requests.
        rate: Requests per second of an open loop; None: a closed loop.
    """

    connections: int
    rate: float | None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.connections} connection{'s' * (self.connections > 1)}"


@dataclass(slots=True)
class LoadTestResult:
    """The rounds of one server at one point.

    Attributes:
        rounds: In their order; the last one is shorter after an interruption.
    """

    point: LoadPoint
    url: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def total(self) -> Round:
        """All rounds as one."""
        total = Round()
        for each in self.rounds:
            total.num_texts += each.num_texts
            total.num_tokens += each.num_tokens
            total.seconds += each.seconds
            total.latencies_s += each.latencies_s
            total.errors += each.errors
            total.client_s += each.client_s
        return total

    def as_json(self) -> dict[str, Any]:
        """Returns the entry of the JSON file: the rounds and their summary."""
        return {
            "url": self.url,
            "connections": self.point.connections,
            "rate": self.point.rate,
            **_numbers(self.total),
            "rounds": [_numbers(each) for each in self.rounds],
        }


class Ratio(NamedTuple):
    """The first server divided by the second: the median, minimum and maximum over the rounds."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min:.2f} to {self.max:.2f})"


def ratios(first: LoadTestResult, second: LoadTestResult) -> dict[str, Ratio]:
    """Compares rounds with the same number, which ran one after the other. Failed rounds are left out."""
    pairs = [(a, b) for a, b in zip(first.rounds, second.rounds, strict=False) if a.latencies_s and b.latencies_s]
    if not pairs:
        return {}
    values = {
        "texts_per_s": [a.texts_per_s / b.texts_per_s for a, b in pairs],
        "p50_latency": [a.latency_ms(0.5) / b.latency_ms(0.5) for a, b in pairs],
        "p99_latency": [a.latency_ms(0.99) / b.latency_ms(0.99) for a, b in pairs],
    }
    return {name: Ratio(statistics.median(found), min(found), max(found)) for name, found in values.items()}


def pairs_of(results: list[LoadTestResult]) -> list[tuple[LoadTestResult, LoadTestResult]]:
    """Returns the results of two servers at the same point; empty for one server."""
    return [(a, b) for a, b in itertools.pairwise(results) if a.point == b.point]


def table(results: list[LoadTestResult], names: dict[str, str]) -> str:
    """Returns the results as text.

    Args:
        results: In order of the points; two servers alternate.
        names: Short name of each URL, for the first column; empty names if there is one server.
    """
    fastest = max(result.total.texts_per_s for result in results)
    columns = "".join(f"{f'{name} ms':>10}" for name in _SHARES)
    lines = [f"{'load':22}{'texts/s':>10}{'tokens/s':>10}{columns}{'errors':>8}"]
    notes: list[str] = []
    for result in results:
        total = result.total
        label = f"{result.point}{names[result.url]}"
        tokens = f"{total.num_tokens / total.seconds:.0f}" if total.num_tokens else "-"
        latencies = "".join(f"{_shown(total.latency_ms(share)):>10}" for share in _SHARES.values())
        bar = "█" * round(_BAR * total.texts_per_s / fastest) if fastest else ""
        lines.append(
            f"{label:22}{total.texts_per_s:10.1f}{tokens:>10}{latencies}{total.errors.total():8}  {bar}".rstrip()
        )
        notes += [f"{label}: {count} requests failed: {kind}" for kind, count in total.errors.most_common()]
        if total.client_share > _BUSY_CLIENT:
            notes.append(
                f"{label}: the client used {total.client_share:.0%} of a core and may limit the result; use larger "
                "requests, or start several clients"
            )
    for first, second in pairs_of(results):
        if found := ratios(first, second):
            shown = ", ".join(f"{name.replace('_', ' ')} {ratio}" for name, ratio in found.items())
            notes.append(f"{first.point}, first server / second server: {shown}".replace("texts per s", "texts/s"))
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _numbers(counted: Round) -> dict[str, Any]:
    latencies: dict[str, float | None] = {name: _finite(counted.latency_ms(share)) for name, share in _SHARES.items()}
    if counted.latencies_s:
        latencies["mean"] = round(1e3 * statistics.fmean(counted.latencies_s), 3)
        latencies["max"] = round(1e3 * max(counted.latencies_s), 3)
    return {
        "requests": len(counted.latencies_s),
        "texts": counted.num_texts,
        "seconds": round(counted.seconds, 3),
        "texts_per_s": round(counted.texts_per_s, 2),
        "tokens_per_s": round(counted.num_tokens / counted.seconds, 1) if counted.num_tokens else None,
        "latency_ms": latencies,
        "errors": dict(Counter(counted.errors)),
        "client_share": round(counted.client_share, 3),
    }


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _shown(milliseconds: float) -> str:
    return "-" if math.isnan(milliseconds) else f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


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


def plot(results: Sequence[LoadTestResult], names: Mapping[str, str], title: str, file: Path) -> None:
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
        for share, style in _LINES.values():
            latencies = [result.total.latency_ms(share) for result in of_server]
            axes.plot(throughputs, latencies, style, color=colour, marker="o", markersize=4)
        for result, throughput in zip(of_server, throughputs, strict=True):
            place = throughput, result.total.latency_ms(max(share for share, _ in _LINES.values()))
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
    styles = [axes.plot([], [], style, color="black", label=label)[0] for label, (_, style) in _LINES.items()]
    numbers = "numbers: requests/s" if rates else "numbers: connections"
    axes.legend(handles=styles, fontsize=8, title=numbers, title_fontsize=8)
    servers = [
        axes.plot([], [], "o-", color=colour, markersize=4, label=name)[0]
        for colour, name in zip(_COLOURS, names.values(), strict=False)
    ]
    figure.legend(handles=servers, loc="outside lower left", fontsize=8, frameon=False)
    figure.savefig(file, dpi=150)


def _load(result: LoadTestResult) -> str:
    return f"{result.point.connections if result.point.rate is None else result.point.rate:g}"
