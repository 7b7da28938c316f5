"""Tables: a title and a small one, as text and as HTML, which a result shows of itself; columns of pandas' tables."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from turbanet.core import extras

LEVEL = r"-q(\d+(?:\.\d+)?(?:e-\d+)?)"  # ends the column of a quantile of a model's forecasts
BOUND = re.compile(rf"-(lo|hi)-[\d.]+$|{LEVEL}$")  # or that of a bound


def quantiles(model: str, columns: Iterable) -> dict[str, float]:
    """Return {column: level} of the quantiles of a model's forecasts, such as "LSTM-q0.9", in the order of levels."""
    of_model = re.compile(re.escape(model) + LEVEL)
    found = [(float(match[1]), match[0]) for match in map(of_model.fullmatch, map(str, columns)) if match]
    return {column: level for level, column in sorted(found)}


class Shown:
    """A result that shows itself as a title and a small table, in a terminal and in a notebook."""

    def _shown(self) -> tuple[str, list[Sequence[str]]]:
        """Return the title and the rows of text, of which the first names the columns."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self._shown()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([title, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        title, rows = self._shown()
        cells = [[html.escape(cell) for cell in row] for row in rows]
        head = "".join(f"<th>{cell}</th>" for cell in cells[0])
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:])
        return f"<p>{html.escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def count(number: int, noun: str) -> str:
    """Return "1 member", "2 members"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def spread(values: np.ndarray) -> str:
    """Return the median of numbers and their range, "0.31 (0.3 to 0.35)", without those that are NaN."""
    values = values[~np.isnan(values)]
    if not len(values):
        return "nan"
    median, low, high = (f"{number:.3g}" for number in (np.median(values), values.min(), values.max()))
    return median if low == high else f"{median} ({low} to {high})"


def dated(column: Any) -> Any:
    """Return a column of times, of pandas, with dates in place of periods and of text."""
    pd = extras.pandas()

    if isinstance(column.dtype, pd.PeriodDtype):
        return column.dt.to_timestamp()
    is_text = pd.api.types.is_string_dtype(column) or pd.api.types.infer_dtype(column) == "date"
    return pd.to_datetime(column) if is_text else column
