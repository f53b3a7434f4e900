"""What a benchmark is: what is measured in it, how, and how it is told."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""What is known of one case: what it is, its status, and its figures."""


@dataclass(frozen=True)
class Bars:
    """A picture: a group of bars for each system, a bar for each column.

    Attributes:
        title: above it.
        unit: of the lengths.
        columns: what the bars of a group are.
        groups: the system, and the length of each of its bars; None where there is none.
        limit: where a line is drawn.
    """

    title: str
    unit: str
    columns: list[str]
    groups: list[tuple[str, list[float | None]]]
    limit: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """One way of measuring.

    Attributes:
        name: on the command line and in the names of the results.
        title: the heading of the results.
        systems: the names of all systems.
        defaults: options as they are where nobody gives them; what is not here does not exist in this benchmark.
        quick: the same for a trial.
        preloaded: what the process has imported from which the others are forked; empty where each is a fresh one.
        cases: the cases, in the order in which they are measured; options and the folder of pictures are given.
        measure: one case: what starts processes, the case and the options are given.
        label: what the results call a case.
        line: a case in a line, as it ends.
        finish: called with all runs after each case, to add what follows from several.
        said: lines of the heading.
        tables: of the results, the short one first.
        legend: what the columns mean.
        bars: the picture.
        cold: whether it can be measured with files that are not in the page cache.
        share: of the time that several benchmarks have together.
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
    said: Callable[[dict[str, Any]], list[str]]
    tables: Callable[[list[Run]], list[str]]
    legend: str
    bars: Callable[[list[Run]], Bars | None]
    share: float
    cold: bool = False
    finish: Callable[[list[Run]], None] = field(default=lambda _: None)


def none(reason: str) -> Run:
    """A case that cannot be measured here."""
    return {"status": "not installed" if reason.startswith("not installed") else "none", "reason": reason}
