"""The state of a loader as plain values: build it from an epoch's progress, check it, merge the states of ranks."""

from __future__ import annotations

import binascii
import copy
from collections.abc import Iterable, Mapping, Sized
from dataclasses import astuple
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from torchdali.state.generators import Generators, States, find_samplers, from_text, to_text
from torchdali.state.progress import Checkpoint, EpochProgress
from torchdali.state.remainder import count_consumed, find_shared_sampler
from torchdali.state.schema import check_values, refuse_damaged
from torchdali.state.sharding import Shard
from torchdali.state.stream import StreamProgress, is_stateful
from torchdali.state.streaming import save_stream

__all__ = [
    "VERSION",
    "build_state",
    "check_state",
    "check_version",
    "describe",
    "find_stateful",
    "merge",
    "read_epochs",
]

VERSION = 1

_SAMPLER_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (BatchSampler, ("batch_size", "drop_last")),
    (RandomSampler, ("replacement", "num_samples")),
    (WeightedRandomSampler, ("replacement", "num_samples")),
    (DistributedSampler, ("num_replicas", "shuffle", "seed", "drop_last")),
)
"""The attributes by which torch's samplers are described."""


def describe(loader: Any) -> dict[str, Any]:
    """Return the properties of a loader that must be equal in a loader that loads its state."""
    shard = find_shared_sampler(loader)
    samplers = {path: _describe_sampler(sampler, shard) for path, sampler in find_samplers(loader).items()}
    iterable = isinstance(loader.dataset, IterableDataset)
    index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return {
        "dataset": None if iterable else _get_length(loader.dataset),
        "batch_size": _get_batch_size(loader),
        "drop_last": loader.drop_last,
        **samplers,
        "batches": None if iterable else _get_length(index_sampler),
        "seed": loader.seed,
        "persistent_workers": loader.persistent_workers,
        **({"num_workers": loader.num_workers} if iterable else {}),
        **({"ranks": shard.num_replicas, "rank": shard.rank} if shard else {}),
    }


_RANK_PROPERTIES = ("ranks", "rank", "batch_size", "batches")
"""Properties that may differ if the state is a merged one."""


def _get_batch_size(loader: Any) -> int | None:
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else loader.batch_size


def _describe_sampler(sampler: Any, shard: DistributedSampler[Any] | None) -> str:
    if shard is not None and sampler is shard:
        name = "distributed='auto': DistributedSampler" if type(shard) is Shard else type(shard).__name__
        values = f"shuffle={shard.shuffle}, seed={shard.seed}, drop_last={shard.drop_last}"
        return f"{name}({values}) of {_get_length(cast('Sized', shard.dataset))} samples"
    if type(sampler) is BatchSampler:
        return f"BatchSampler(drop_last={sampler.drop_last})"
    for kind, names in _SAMPLER_ATTRIBUTES:
        if isinstance(sampler, kind):
            values = ", ".join(f"{name}={getattr(sampler, name, None)!r}" for name in names)
            return f"{type(sampler).__name__}({values})"
    length = _get_length(sampler)
    return type(sampler).__name__ if length is None else f"{type(sampler).__name__} of {length}"


def _get_length(sized: Sized) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def find_stateful(loader: Any) -> dict[str, Any]:
    """Return the sampler whose state torchdata's ``StatefulDataLoader`` would save, by its path; or nothing."""
    for path, sampler in find_samplers(loader).items():
        if is_stateful(sampler):
            return {path: sampler}
        if type(sampler) is not BatchSampler:
            break
    return {}


def read_epochs(loader: Any, upcoming: bool = False) -> dict[str, dict[str, Any]]:
    """Return the epochs of samplers with ``set_epoch``. With ``upcoming``, a sampler that counts tells its next one."""
    return {
        path: {"epoch": sampler.next_epoch if upcoming and isinstance(sampler, Shard) else int(sampler.epoch)}
        for path, sampler in find_samplers(loader).items()
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)
    }


def build_state(loader: Any, progress: EpochProgress | None, epochs: int, used: set[str]) -> dict[str, Any]:
    """Return the state of a loader.

    Args:
        loader: The loader.
        progress: Where its latest epoch is; None before the first.
        epochs: How many were begun.
        used: Names of the generators that were seen to be drawn from.
    """
    latest = progress
    current = progress if progress and (not progress.finished or _is_stream_kept(loader, progress)) else None
    # A sampler may have made a generator in an epoch that is finished, so look for generators again.
    generators = current.generators if current else Generators(loader)
    names, shard = generators.required | used, find_shared_sampler(loader)
    rng_now = _encode({name: state for name, state in generators.states().items() if name in names})
    if current:
        progress, samplers, states, first = current, current.samplers, current.sampler_states(), current.first_states
        rng_at_start = _encode({name: state for name, state in current.rng_at_start.items() if name in names})
    else:
        samplers, rng_at_start = read_epochs(loader, upcoming=True), rng_now
        states = first = {path: sampler.state_dict() for path, sampler in find_stateful(loader).items()}
        # Persistent workers keep their base seed.
        seed = progress.base_seed if progress and loader.persistent_workers else None
        progress = EpochProgress(generators, {}, epochs, drew_base_seed=seed is None, base_seed=seed)
    stream = save_stream(loader, latest) if latest and isinstance(loader.dataset, IterableDataset) else None
    return {
        "version": VERSION,
        **({"stream": stream} if stream else {}),
        "loader": describe(loader),
        "begun": current is not None,
        "over": current is not None and current.finished,
        "epoch": progress.epoch,
        "start": progress.start,
        "reached": count_consumed(shard, progress.start, progress.num_yielded * (_get_batch_size(loader) or 1))
        if shard
        else 0,
        "batches": progress.num_yielded,
        "asked": progress.num_yielded if isinstance(loader.dataset, IterableDataset) else progress.num_requested,
        "iterators": progress.num_iterators,
        "base_seed": progress.base_seed,
        "base_seed_drawn": progress.drew_base_seed,
        "samplers": copy.deepcopy(
            {
                path: samplers.get(path, {})
                | ({"state": states[path], "state_at_begin": first[path]} if path in states else {})
                for path in dict.fromkeys([*samplers, *states])
            }
        ),
        "generators": rng_now,
        "generators_at_begin": rng_at_start,
        "draws": [[0, _encode(progress.rng_at_first_request)]] if progress.rng_at_first_request else [],
        "worker": progress.worker,
        "workers": [[worker, *astuple(stream)] for worker, stream in progress.streams.items()],
    }


def _is_stream_kept(loader: Any, progress: EpochProgress) -> bool:
    """Return whether the next epoch uses the same stateful stream, and not a new copy of the user's dataset."""
    return (loader.persistent_workers or not loader.num_workers) and any(
        stream.has_state for stream in progress.streams.values()
    )


def _encode(states: States) -> dict[str, str]:
    return {name: to_text(state) for name, state in states.items()}


def check_state(state: Mapping[str, Any], loader: Any) -> Checkpoint:
    """Return the checkpoint of a state. Its version was checked before.

    Raises:
        ValueError: The state belongs to another loader, or is damaged. The message says what differs.
    """
    state, current = _select_rank(state, loader), describe(loader)
    saved_properties = cast("dict[str, Any]", state.get("loader", {}))
    differing = [
        f"{name} is {saved_properties.get(name, 'none')!r} in the state and {current.get(name, 'none')!r} here"
        for name in dict.fromkeys([*saved_properties, *current])
        if saved_properties.get(name, "none") != current.get(name, "none")
    ]
    if differing:
        raise ValueError(
            "the state must come from a loader like this one; make the loader as it was when the state was saved: "
            f"{'; '.join(differing)}{_suggest_ranks(saved_properties, loader)}"
        )
    try:
        saved = Checkpoint(
            copy.deepcopy(dict(state)) | ({"worker": 0} if "stream" in state else {}),
            _decode(state["generators"]),
            _decode(state["generators_at_begin"]),
            _decode(state["draws"][0][1]) if state["draws"] else {},
            {
                worker: StreamProgress(batches, samples, copy.deepcopy(own))
                for worker, batches, samples, own in state["workers"]
            },
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, binascii.Error) as error:
        refuse_damaged(repr(error), error)
    generators = Generators(loader)
    missing = {*saved.rng_now, *saved.rng_at_start} - {*generators.own, *generators.lazy, *generators.shared}
    if missing:
        raise ValueError(
            f"the loader must have all generators of the state, got none for {', '.join(sorted(missing))}; give them "
            "to the loader or its sampler, as when the state was saved"
        )
    for states in (saved.rng_now, saved.rng_at_start, saved.rng_at_first_request):
        generators.check(states)
    return saved


def _suggest_ranks(saved_properties: Mapping[str, Any], loader: Any) -> str:
    """Return what to do about a difference in ranks."""
    ranks, shard = saved_properties.get("ranks"), find_shared_sampler(loader)
    if ranks and (shard is None or shard.num_replicas != ranks):
        return f". Any number of ranks can load the result of torchdali.state.merge of all {ranks} ranks"
    if shard is None and loader.distributed and str(saved_properties.get("sampler")).startswith("distr"):
        return ". Or call torch.distributed.init_process_group before; a single process is a group of size 1"
    return ""


def check_version(state: object) -> None:
    """Raise if a state is no dictionary, has another version, or is damaged."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state must be the dictionary that state_dict() returned, got {type(state).__name__}; "
            "load_state_dict({}) loads nothing"
        )
    version = cast("Mapping[str, Any]", state).get("version")
    if version != VERSION:
        advice = "no DALILoader saved it" if version is None else "load it with the torchdali that saved it"
        raise ValueError(f"the state must be of version {VERSION}, got version {version!r}; {advice}")
    check_values(cast("Mapping[str, Any]", state))


_RANK_DEFAULTS: dict[str, Any] = {
    "base_seed": None,
    "base_seed_drawn": True,
    "generators": {},
    "generators_at_begin": {},
}
"""The entries that each rank has for itself, with the values of a rank without a state."""


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one that loaders on any number of ranks can load.

    The loaders must have ``distributed="auto"`` or a ``DistributedSampler``. The rest of the epoch is shared as
    ``DistributedSampler`` would share it. Every sample that no rank has yielded comes once, with the augmentation that
    it would have had.

    Args:
        states: The results of ``state_dict()`` on all ranks, in any order, after the same number of batches.

    Returns:
        A state of plain values. Load it with ``load_state_dict()`` on every rank.

    Raises:
        ValueError: A rank's state is missing, or the states belong to different batches. The message says what differs.
        TypeError: ``states`` is a single state, or contains something that is no state.
    """
    if isinstance(states, Mapping):
        raise TypeError("merge() must get a list with the states of all ranks, got one state; gather the others")
    rank_states: list[dict[str, Any]] = []
    for state in states:
        check_version(state)
        rank_states.append(copy.deepcopy(dict(state)))
    if not rank_states:
        raise ValueError("merge() must get a list with the states of all ranks, got an empty one; gather them first")
    for state in rank_states:
        if "rank" not in state.get("loader", {}):
            raise ValueError(
                "each state to merge must be of one rank, got one without a rank; save it from a loader with "
                "distributed='auto' in a process group, or with a DistributedSampler"
            )
    rank_states.sort(key=lambda state: state["loader"]["rank"])
    ranks, num_ranks = [state["loader"].pop("rank") for state in rank_states], rank_states[0]["loader"]["ranks"]
    if ranks != list(range(num_ranks)):
        raise ValueError(
            f"the states must be of ranks 0 to {num_ranks - 1}, one of each, got ranks {ranks}; call state_dict() "
            "on every rank"
        )
    first = rank_states[0]
    for rank, state in enumerate(rank_states):
        for name in ("loader", "begun", "epoch", "samplers", "start", "batches"):
            if state[name] != first[name]:
                raise ValueError(
                    f"the states must be of one batch, but {name} is {first[name]!r} on rank 0 and {state[name]!r} "
                    f"on rank {rank}; call state_dict() after the same number of batches on all ranks"
                )
    own = [{name: state[name] for name in _RANK_DEFAULTS} for state in rank_states]
    return {
        **{name: value for name, value in first.items() if name not in _RANK_DEFAULTS},
        "loader": {name: value for name, value in first["loader"].items() if name not in _RANK_PROPERTIES},
        "start": first["reached"],
        "batches": 0,
        "asked": 0,
        "draws": [],
        "ranks": num_ranks,
        "of_ranks": own if any(entry != own[0] for entry in own) else own[:1],
    }


def _select_rank(state: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    """Return this rank's part of a merged state. Another rank's state becomes this rank's, at the same batch."""
    if "of_ranks" not in state:
        properties, current = state.get("loader", {}), describe(loader)
        if "rank" not in properties or "rank" not in current:
            return state
        return {**state, "loader": {**properties, "rank": current["rank"]}}
    of_ranks: list[dict[str, Any]] = state["of_ranks"]
    own, shard, current = of_ranks[0], find_shared_sampler(loader), describe(loader)
    if len(of_ranks) > 1 and shard:
        own = of_ranks[shard.rank] if shard.num_replicas == state["ranks"] else _RANK_DEFAULTS
        seeds = {entry["base_seed"] for entry in of_ranks}
        if own is _RANK_DEFAULTS and state["begun"] and loader.seed is None and len(seeds) > 1:
            raise ValueError(
                f"a state of {state['ranks']} ranks with different random numbers must be loaded on as many ranks, got "
                f"{shard.num_replicas}; load it on {state['ranks']} ranks, and give seed= to the next run"
            )
    properties = state["loader"] | {name: current[name] for name in _RANK_PROPERTIES if name in current}
    shared = {name: value for name, value in state.items() if name not in ("ranks", "of_ranks")}
    return {**shared, **own, "loader": properties}


def _decode(states: Mapping[str, str]) -> States:
    return {name: from_text(text) for name, text in states.items()}
