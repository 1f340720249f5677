"""The resolved table of a model as text, for the start-up log and `penstock info`."""

from __future__ import annotations

from collections.abc import Iterable


def format_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns (field, value, source) rows as aligned lines."""
    shown = [("field", "value", "from"), *rows]
    name_width = max(len(name) for name, _, _ in shown)
    value_width = max(len(value) for _, value, _ in shown if len(value) <= 60)
    return "\n".join(
        f"  {name:{name_width}}  {value:{value_width}}  {source}".rstrip() for name, value, source in shown
    )
