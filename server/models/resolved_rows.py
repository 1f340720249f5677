"""What was resolved of a model, as lines for people."""

from __future__ import annotations

from collections.abc import Iterable


def format_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns the (field, value, source) rows of a resolved model as aligned lines."""
    shown_rows = [("field", "value", "from"), *rows]
    name_width = max(len(name) for name, _, _ in shown_rows)
    value_width = max(len(value) for _, value, _ in shown_rows if len(value) <= 60)
    return "\n".join(
        f"  {name:{name_width}}  {value:{value_width}}  {source}".rstrip() for name, value, source in shown_rows
    )
