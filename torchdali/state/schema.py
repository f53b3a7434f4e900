"""Check the values of a state before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["check_values", "refuse_damaged"]

_INT64 = 2**63 - 1
_MOST_AHEAD = 2**20
"""The most batches that are requested ahead of those that were yielded."""
_MOST_WORKERS = 2**16

_FLAGS = ("begun", "over", "base_seed_drawn")
_COUNTS = ("epoch", "start", "batches", "asked", "iterators", "worker")
_OTHERS = ("loader", "samplers", "generators", "generators_at_begin", "base_seed", "draws", "workers")


def refuse_damaged(problem: str, cause: Exception | None = None) -> NoReturn:
    """Raise ValueError for a state that is not as ``state_dict()`` returned it."""
    raise ValueError(f"the state is damaged, or no DALILoader saved it; load another one: {problem}") from cause


def check_values(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a value of a state is missing, or of another type or range.

    What is decoded when a state is loaded is checked there: generators, draws and workers.
    """
    if "of_ranks" in state:
        _check_merged(state)
        state = {**state, **state["of_ranks"][0]}
    for name in (*_FLAGS, *_COUNTS, *_OTHERS):
        if name not in state:
            refuse_damaged(f"{name} is missing")
    for name in ("loader", "samplers"):
        _require(isinstance(state[name], Mapping), name, "a dictionary", state[name])
    stream = state.get("stream", {})
    _require(isinstance(stream, Mapping), "stream", "a dictionary", stream)
    for path, saved in state["samplers"].items():
        _require(isinstance(saved, Mapping), f"samplers[{path!r}]", "a dictionary", saved)
        if "epoch" in saved:
            _check_count(f"samplers[{path!r}]['epoch']", saved["epoch"])
    _check_seed(state)
    for name in _FLAGS:
        _require(isinstance(state[name], bool), name, "a bool", state[name])
    for name in _COUNTS:
        _check_count(name, state[name])
    _check_counts(state, state["loader"].get("batches"))


def _check_merged(state: Mapping[str, Any]) -> None:
    _require(isinstance(state["of_ranks"], list), "of_ranks", "a list of dictionaries", state["of_ranks"])
    ranks: list[Any] = state["of_ranks"]
    _require(bool(ranks), "of_ranks", "a list of one dictionary or more", ranks)
    for own in ranks:
        _require(isinstance(own, Mapping), "of_ranks", "a list of dictionaries", ranks)
        _check_seed(own)
    _check_count("ranks", state.get("ranks"))
    _require(len(ranks) in (1, state["ranks"]), "of_ranks", f"of 1 or {state['ranks']} entries", len(ranks))


def _check_seed(state: Mapping[str, Any]) -> None:
    seed: Any = state.get("base_seed")
    is_seed = seed is None or (_is_int(seed) and -_INT64 - 1 <= seed <= _INT64)
    _require(is_seed, "base_seed", "an integer of 64 bits or None", seed)


def _check_counts(state: Mapping[str, Any], length: Any) -> None:
    """Check that counts fit together; a loop runs as often as some of them say."""
    most = length if _is_int(length) else _INT64
    _require(state["batches"] <= most, "batches", f"at most {most}", state["batches"])
    ahead = state["batches"] + _MOST_AHEAD
    _require(state["batches"] <= state["asked"] <= ahead, "asked", f"{state['batches']} to {ahead}", state["asked"])
    is_shared = "rank" in state["loader"] or "ranks" in state
    _require(state["start"] == 0 or is_shared, "start", "0 without a sampler that ranks share", state["start"])
    _require(state["worker"] < _MOST_WORKERS, "worker", f"below {_MOST_WORKERS}", state["worker"])
    _require(state["begun"] or not state["over"], "over", "False of an epoch that has not begun", state["over"])


def _check_count(name: str, value: Any) -> None:
    _require(_is_int(value) and 0 <= value <= _INT64, name, "an integer of 0 or more", value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, wanted: str, value: Any) -> None:
    if not holds:
        refuse_damaged(f"{name} must be {wanted}, got {value!r:.80}")
