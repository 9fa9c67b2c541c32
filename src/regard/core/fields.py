"""The fields of a dataclass instance as lines of text and as an HTML table, with a row for each field."""

from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import Any


def as_lines(record: Any) -> str:
    """Return the class name and the fields of a dataclass instance as text.

    Numbers are written with thousands separators, and each entry of a mapping has a line of its own.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Cost:
    ...     flops: int
    ...     refused: dict[str, str]
    >>> print(as_lines(Cost(12_000, {"flex": "no GPU", "short": "no GPU"})))
    Cost
      flops    12,000
      refused  flex: no GPU
               short: no GPU
    """
    rows = {field.name: _written(getattr(record, field.name)) for field in fields(record)}
    width = max(map(len, rows), default=0)
    lines = [
        f"  {'' if n else name:{width}}  {line}" for name, written in rows.items() for n, line in enumerate(written)
    ]
    return "\n".join([type(record).__name__, *lines])


def as_table(record: Any) -> str:
    """Return the fields of a dataclass instance as an HTML table."""
    rows = (
        f'<tr><th style="text-align:left;vertical-align:top">{escape(field.name)}</th>'
        f'<td style="text-align:left">{"<br>".join(map(escape, _written(getattr(record, field.name))))}</td></tr>'
        for field in fields(record)
    )
    return f"<table>{''.join(rows)}</table>"


def _written(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{name}: {entry}" for name, entry in value.items()] or ["none"]
    return [f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)]
