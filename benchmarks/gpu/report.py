"""Evaluates the goals from the rows of the phases: met or not, the value, and goals without a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from .kernel_table import KERNELS
from .shapes import OWN_VARIANTS, SHAPES

Report = dict[str, Any]
Row = dict[str, Any]

LEAST_COSINE: Final = 0.999


class Goal(NamedTuple):
    """A goal for the results on a GPU.

    Attributes:
        what: In words.
        least: The figure that is asked for.
        found: Returns the value from a report; None if it was not measured.
    """

    what: str
    least: float
    found: Callable[[Report], float | None]


def has_ended(report: Report, phase: str) -> bool:
    """Whether a phase ran, and to its end."""
    return phase in report["phases"] and report["phases"][phase]["error"] is None


def rows_of(report: Report, phase: str, **wanted: object) -> list[Row]:
    """Returns the rows of a phase with these values, without failed and skipped rows."""
    rows = report["phases"].get(phase, {}).get("rows", [])
    return [
        row
        for row in rows
        if "error" not in row and "skipped" not in row and all(row.get(key) == value for key, value in wanted.items())
    ]


def matrix_rate(report: Report) -> float | None:
    """TFLOP/s of the square product."""
    return _largest(row["tflop_per_s"] for row in rows_of(report, "ceilings", name="matmul"))


def equal_kernels(report: Report) -> float | None:
    """Share of the kernels that equal their references, by dtype. A failed kernel counts as different.

    None where all that were compared do and some were not: they may not.
    """
    rows = [row for row in report["phases"].get("kernels", {}).get("rows", []) if "dtype" in row]
    num_equal = sum(row.get("is_equal", False) for row in rows)
    is_whole = has_ended(report, "kernels") and len(rows) == 2 * len(KERNELS)  # bfloat16, float32
    return num_equal / len(rows) if rows and (is_whole or num_equal < len(rows)) else None


def share_of_copy(*kernels: str) -> Callable[[Report], float | None]:
    """The least share of the copy bandwidth among these kernels; None unless all were timed."""

    def found(report: Report) -> float | None:
        shares = [
            row["of_copy"] for name in kernels for row in rows_of(report, "kernels", name=name) if "of_copy" in row
        ]
        return min(shares) if len(shares) == len(kernels) else None

    return found


def least_cosine(report: Report) -> float | None:
    """The least cosine of a bfloat16 forward's rows with float32 on the CPU; a failed forward or NaN counts as 0.

    Covers the variants that a server runs. None if all compared variants are close enough and some were not compared.
    """
    rows = [
        row
        for row in report["phases"].get("forwards", {}).get("rows", [])
        if row.get("name") == "cosine" and row.get("variant") in OWN_VARIANTS and "skipped" not in row
    ]
    cosines = [row.get("cosine", 0.0) for row in rows]
    least = min((0.0 if math.isnan(cosine) else cosine for cosine in cosines), default=None)
    compared = {(row["shape"], row["variant"]) for row in rows}
    is_whole = compared >= {(shape.name, variant) for shape in SHAPES for variant in OWN_VARIANTS}
    return least if least is not None and (is_whole or least < LEAST_COSINE) else None


def share_of_matrix_rate(phase: str, **wanted: object) -> Callable[[Report], float | None]:
    """The best share of the matrix rate among the rows of a phase."""

    def found(report: Report) -> float | None:
        best, ceiling = _largest(row["tflop_per_s"] for row in rows_of(report, phase, **wanted)), matrix_rate(report)
        return best / ceiling if best is not None and ceiling else None

    return found


def times_peer(shape: str) -> Callable[[Report], float | None]:
    """The engine's texts/s over those of sentence-transformers in its best batch size."""

    def found(report: Report) -> float | None:
        ours = _largest(row["texts_per_s"] for row in rows_of(report, "peer", name="penstock", shape=shape))
        theirs = _largest(
            row["texts_per_s"] for row in rows_of(report, "peer", name="sentence-transformers", shape=shape)
        )
        return ours / theirs if ours is not None and theirs else None

    return found


def http_share(report: Report) -> float | None:
    """Ratio of tokens/s over HTTP to tokens/s of the engine, for texts of 512 tokens and bge-large."""
    over_http = _largest(row["tokens_per_s"] for row in rows_of(report, "http", name="long"))
    rates = rows_of(report, "engine", name="rate", shape="bge-large", lengths="equal 512")
    inside = _largest(row["tokens_per_s"] for row in rates)
    return over_http / inside if over_http is not None and inside else None


def short_requests(report: Report) -> float | None:
    """Requests/s of one short text each, with the best number of HTTP processes."""
    return _largest(row["requests_per_s"] for row in rows_of(report, "http", name="short"))


GOALS: Final = (
    Goal("kernels that equal their references (share)", 1.0, equal_kernels),
    Goal("cosine of bfloat16 with float32 on the CPU, the least", LEAST_COSINE, least_cosine),
    Goal(
        "pooling and norms, 64k tokens of width 1024, share of copy",
        0.9,
        share_of_copy("pooling mean", "pooling max", "sum and layer norm", "sum and RMS norm"),
    ),
    Goal(
        "MiniLM forward, 128 tokens, share of the matrix rate",
        0.35,
        share_of_matrix_rate("forwards", name="forward", shape="MiniLM-L6", lengths="equal 128"),
    ),
    Goal(
        "engine, bge-base, 512 tokens, share of the matrix rate",
        0.6,
        share_of_matrix_rate("engine", name="rate", shape="bge-base", lengths="equal 512"),
    ),
    Goal(
        "engine, bge-large, 512 tokens, share of the matrix rate",
        0.6,
        share_of_matrix_rate("engine", name="rate", shape="bge-large", lengths="equal 512"),
    ),
    Goal("MiniLM, ShareGPT's lengths, times sentence-transformers", 3.0, times_peer("MiniLM-L6")),
    Goal("bge-base, ShareGPT's lengths, times sentence-transformers", 3.0, times_peer("bge-base")),
    Goal("bge-large, ShareGPT's lengths, times sentence-transformers", 3.0, times_peer("bge-large")),
    Goal("bge-large over HTTP, share of the engine's rate", 0.9, http_share),
    Goal("short requests/s over HTTP", 25_000, short_requests),
)


def judged(report: Report) -> list[Row]:
    """Returns each goal, its value, and whether it is met; None if it was not measured or sizes are tiny."""
    lines = []
    for goal in GOALS:
        figure = goal.found(report)
        is_met = None if figure is None or report["is_tiny"] else figure >= goal.least
        lines.append({"goal": goal.what, "least": goal.least, "found": figure, "is_met": is_met})
    return lines


def as_text(report: Report) -> Iterator[str]:
    """Yields the lines of the goals for a terminal."""
    for line in report["goals"]:
        verdict = {None: "not measured", True: "met", False: "NOT met"}[line["is_met"]]
        yield f"{line['goal']:<62}{_figure(line['least']):>10}{_figure(line['found']):>12}  {verdict}"


def as_markdown(report: Report) -> str:
    """Returns a report to read: the goals, then a table for each phase."""
    machine = next(iter(rows_of(report, "ceilings", name="machine")), {})
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    parts = [
        f"# GPU, {report['date']}, {machine.get('device', report['device'])}",
        f"penstock at commit {machine.get('commit', 'unknown')}; Python {machine.get('python', '?')}, {versions}. "
        f"The run took {report['seconds']:.0f} s."
        + (" Sizes are tiny: no figure means anything." if report["is_tiny"] else ""),
        "## Goals",
        _table(
            ["goal", "at least", "found", "met"],
            ([g["goal"], _figure(g["least"]), _figure(g["found"]), _figure(g["is_met"])] for g in report["goals"]),
        ),
    ]
    for name, phase in report["phases"].items():
        parts.append(f"## {name}")
        parts.append(f"{phase['about']}; {phase['seconds']:.0f} s.")
        if phase["error"]:
            parts.append(f"It did not end well: {phase['error']}")
        for rows in _alike(row for row in phase["rows"] if row.get("name") != "machine"):
            columns = list(dict.fromkeys(column for row in rows for column in row))
            parts.append(_table(columns, ([_figure(row.get(column)) for column in columns] for row in rows)))
    return "\n\n".join(parts) + "\n"


def _alike(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Groups rows with equal columns into tables. Failed and skipped rows have their own tables."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    return kinds.values()


def _table(columns: list[str], lines: Iterable[list[str]]) -> str:
    cells = [columns, ["---"] * len(columns), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in cells
    )


def _figure(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return "; ".join(_figure(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_figure(each)}" for key, each in value.items())
    return str(value)


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)
