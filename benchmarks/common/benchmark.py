"""Parts of a benchmark that the harness runs."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""Result of one case: its label, its status, and its figures."""


@dataclass(frozen=True)
class Bars:
    """A picture with a group of bars for each system, and a bar for each column.

    Attributes:
        title: Title.
        unit: Unit of the lengths.
        columns: Names of the bars of a group.
        groups: System and lengths of its bars. A missing bar is None.
        limit: Length at which a line is drawn, or None.
    """

    title: str
    unit: str
    columns: list[str]
    groups: list[tuple[str, list[float | None]]]
    limit: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that the harness runs.

    Attributes:
        name: Name on the command line and of the results.
        title: Heading of the results.
        systems: Names of all systems.
        defaults: Default values of its options. It has no other options.
        quick: Default values for a trial.
        preloaded: Modules imported by the process that forks the others. Empty if each process is a new interpreter.
        cases: Function from the options and the pictures' folder to the cases, in order.
        measure: Function that measures a case, given the context that starts processes, the case and the options.
        label: Function from a case to its label in the results.
        line: Function from a result to the line that is printed.
        finish: Function called with all results after each case, to add figures that follow from several.
        heading: Function from the report to lines of the heading.
        tables: Function from the results to the tables, the short one first.
        legend: Explanation of the columns.
        bars: Function from the results to the picture.
        share: Share of the time that several benchmarks have together.
        cold: Whether it can run with files that are not in the page cache.
    """

    name: str
    title: str
    systems: tuple[str, ...]
    defaults: dict[str, Any]
    quick: dict[str, Any]
    preloaded: tuple[str, ...]
    cases: Callable[[Namespace, Path], list[Any]]
    measure: Callable[[BaseContext, Any, Namespace], Run]
    label: Callable[[Any], Run]
    line: Callable[[Run], str]
    heading: Callable[[dict[str, Any]], list[str]]
    tables: Callable[[list[Run]], list[str]]
    legend: str
    bars: Callable[[list[Run]], Bars | None]
    share: float
    cold: bool = False
    finish: Callable[[list[Run]], None] = field(default=lambda _: None)


def make_unavailable_run(reason: str) -> Run:
    """Return the result of a case that cannot be measured here."""
    return {"status": "not installed" if reason.startswith("not installed") else "none", "reason": reason}
