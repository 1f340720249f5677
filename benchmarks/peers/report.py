"""Writes the results of a run: Markdown for the report, plain lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]


def table(report: Report, plots: list[str]) -> str:
    """Returns the Markdown of a report.

    Args:
        report: Result of Comparison.
        plots: File names of its plots, beside the table.
    """
    parts = [
        f"# Peers, {report['date']}, {report['machine']['cpu']}",
        _head(report),
        "## Settings",
        _settings(report),
        *_loads(report),
        "## Start, memory, agreement",
        _facts(report),
        *_sweeps(report),
        *(f"![{name}]({name})" for name in plots),
        *_left_out(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(report: Report) -> None:
    """Prints the loads, the properties of each side, and the skipped loads and sides."""
    for name, load in report["loads"].items():
        print(f"\n{name}: {load['about']}")
        print(f"{'':24}{'texts/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'ratio':>8}{'of limit':>10}")
        for side, own in load["sides"].items():
            print(
                f"{side:24}{own['median_texts_per_s']:>10.1f}{own['p50_ms']:>10.2f}{own['p99_ms']:>10.2f}"
                f"{own['first_is_times_faster']:>8.2f}{own['share_of_limit']:>10.1%}"
            )
    print()
    for name, facts in report["peers"].items():
        print(
            f"{name}: {setting_in_words(facts['setting'])}; {_get(facts, 'ready_s')} s, {_get(facts, 'peak_mib')} MiB"
        )
    for name, reason in report["left_out"].items():
        print(f"left out: {name}: {reason}")


def setting_in_words(setting: dict[str, Any]) -> str:
    """Returns a setting as tables show it."""
    threads = setting["threads"]
    return f"{setting['dtype']}, {threads} thread{'s' if threads > 1 else ''}, {setting['variant']}"


def rows(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table."""
    names = list(header)
    body = [names, ["---"] * len(names), *lines]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in body)


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _head(report: Report) -> str:
    settings, limit = report["settings"], report["limit_gflops"]
    rates = "; ".join(
        f"{dtype} " + ", ".join(f"{rate:.0f} with {threads}" for threads, rate in by_threads.items())
        for dtype, by_threads in limit.items()
    )
    return (
        f"penstock at commit {report['commit']}. {settings['rounds']} rounds of {settings['seconds']:g} s of each side "
        f"in turn; medians. Sweeps: {settings['sweep_rounds']} rounds of {settings['sweep_seconds']:g} s. The run took "
        f"{report['minutes']:g} minutes; load average before it {report['machine']['load_average']:g}.\n\n"
        f"Limit of the machine (best matrix product, GFLOPS by number of threads): {rates}. Shares are of the largest, "
        "and count the matrix products of the tokens alone."
    )


def _settings(report: Report) -> str:
    chosen = [
        [f"{name} {facts['version']}", facts["over"], setting_in_words(facts["setting"])]
        for name, facts in report["peers"].items()
    ]
    tried = [
        [name, setting_in_words(trial["setting"]), trial["score"] or "", trial["least_cosine"] or "", trial["reason"]]
        for name, facts in report["peers"].items()
        for trial in facts["trials"]
    ]
    return (
        "The best of each, by the geometric mean of texts/s over the loads of a short trial, among those whose answers "
        f"have a cosine of {report['settings']['least_cosine']} and more with a float32 reference.\n\n"
        + rows(("side", "how", "setting"), chosen)
        + "\n\nTrials:\n\n"
        + rows(("side", "setting", "texts/s", "least cosine", "not taken, because"), tried)
    )


def _loads(report: Report) -> list[str]:
    parts = []
    for name, load in report["loads"].items():
        lines = [
            [
                side,
                f"{own['median_texts_per_s']:,.1f}",
                f"{own['p50_ms']:.2f}",
                f"{own['p99_ms']:.2f}",
                f"{own['first_is_times_faster']:.2f} ({min(own['ratios']):.2f} to {max(own['ratios']):.2f})",
                f"{own['share_of_limit']:.1%}",
            ]
            for side, own in load["sides"].items()
        ]
        first = next(iter(load["sides"]), "")
        header = ("side", "texts/s", "p50 ms", "p99 ms", f"{first} is times faster", "share of the limit")
        about = f"{load['about']}; {load['tokens_per_text']:g} tokens a text."
        parts += [f"## {name}", about[0].upper() + about[1:], rows(header, lines)]
    return parts


def _facts(report: Report) -> str:
    lines = [
        [
            name,
            _get(facts, "ready_s"),
            _get(facts, "idle_mib"),
            _get(facts, "resident_mib"),
            _get(facts, "peak_mib"),
            _get(facts, "idle_processor_share"),
            _get(facts, "least_cosine") if facts.get("agrees", True) else f"**{facts['least_cosine']}: too low**",
        ]
        for name, facts in report["peers"].items()
    ]
    header = ("side", "ready, s", "MiB at first", "MiB after the loads", "peak MiB", "processors when idle", "cosine")
    return rows(header, lines)


def _sweeps(report: Report) -> list[str]:
    parts = []
    for sweep, points in report["sweeps"].items():
        sides = list(dict.fromkeys(side for point in points.values() for side in point["sides"]))
        lines = [[point, *(_point(load["sides"].get(side)) for side in sides)] for point, load in points.items()]
        unit = {"concurrency": "at once", "length": "words"}[sweep]
        parts += [f"## Against {sweep}", "texts/s, and the median latency in ms.", rows((unit, *sides), lines)]
    return parts


def _point(own: dict[str, Any] | None) -> str:
    return "" if own is None else f"{own['median_texts_per_s']:,.0f}, {own['p50_ms']:.1f}"


def _left_out(report: Report) -> list[str]:
    if not report["left_out"]:
        return []
    lines = [f"- {name}: {' '.join(reason.split())}" for name, reason in report["left_out"].items()]
    return ["## Left out", "\n".join(lines)]


def _get(facts: dict[str, Any], name: str) -> Any:
    """A value of a side; empty if the side failed before it."""
    return facts.get(name, "")
