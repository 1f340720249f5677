"""Writes the results of a run as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Returns the Markdown of a report of compare_peers.py."""
    machine, settings = report["machine"], report["settings"]
    head = (
        f"penstock at commit {report['commit']}, {machine['platform']}, Python {machine['python']}. "
        f"{settings['rounds']} rounds of {settings['seconds']:g} s of each side in turn. "
        f"The run took {report['minutes']:g} minutes; load average before it {machine['load_average']:g}.\n\n"
        "short: 5 to 15 words, one text per request. long: 150 words, 8 texts per request. image and images: one photo "
        "or 16 photos of 640 x 480 pixels per request. The number is that of the connections. A cell shows texts/s or "
        "images/s and, in parentheses, how many times faster the first side is: the median of the ratios within each "
        "round. Below 1 the first side loses."
    )
    parts = [f"# Peers, {report['date']}, {machine['cpu']}", head]
    for name, model in report["models"].items():
        parts += [f"## {name}", _loads(model), _sides(model), _left_out(model)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loads(model: dict[str, Any]) -> str:
    lines = [[load, *(_cell(figures.get(side)) for side in model["peers"])] for load, figures in model["loads"].items()]
    return _rows(("load", *model["peers"]), lines)


def _cell(own: dict[str, Any] | None) -> str:
    return "" if own is None else f"{own['median_texts_per_s']:,.1f} ({own['first_is_times_faster']:.2f})"


def _sides(model: dict[str, Any]) -> str:
    lines = []
    for name, facts in model["peers"].items():
        setting = ", ".join(str(value) for value in facts["setting"].values() if value)
        trials = "; ".join(f"{tried}: {rate:g}" for tried, rate in facts.get("trials", {}).items())
        trials += "".join(f"; {reason}" for reason in facts.get("rejected", []))
        side = f"{name} {facts['version']}".strip()
        memory = facts.get("peak_mib") or ""
        quality = facts.get("quality", {})
        scores = [quality.get("ndcg_at_10", ""), quality.get("accuracy", "")]
        lines.append([side, facts["over"], setting, facts["least_cosine"], *scores, facts["ready_s"], memory, trials])
    columns = ("side", "how", "setting", "least cosine", "SciFact nDCG@10", "Banking77 accuracy")
    header = (*columns, "ready, s", "peak MiB", "trials, texts/s of the first load")
    return _rows(header, lines)


def _left_out(model: dict[str, Any]) -> str:
    lines = [f"- {name}: {' '.join(reason.split())}" for name, reason in model["left_out"].items()]
    return "\n".join(["Left out:", "", *lines]) if lines else ""


def _rows(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    names = list(header)
    body = [names, ["---"] * len(names), *lines]
    return "\n".join(
        "| " + " | ".join(" ".join(str(v).replace("|", "\\|").split()) for v in line) + " |" for line in body
    )
