"""The state of a loader as plain values: made of where an epoch is, and checked before it is loaded."""

from __future__ import annotations

import binascii
import copy
from collections.abc import Iterable, Mapping, Sized
from dataclasses import astuple
from typing import Any, cast

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from torchdali.state.generators import Generators, States, from_text, samplers_of, to_text
from torchdali.state.progress import Checkpoint, EpochProgress, StreamProgress
from torchdali.state.remainder import reached, shared
from torchdali.state.sharding import Shard

__all__ = [
    "VERSION",
    "check_version",
    "checked",
    "describe",
    "epochs_of",
    "is_stateful",
    "merge",
    "state_of",
    "stateful_among",
]

VERSION = 1

_NEEDED = (
    *("begun", "over", "epoch", "start", "batches", "asked", "iterators", "base_seed", "base_seed_drawn", "samplers"),
    "worker",
)

_ABOUT: tuple[tuple[type, tuple[str, ...]], ...] = (
    (BatchSampler, ("batch_size", "drop_last")),
    (RandomSampler, ("replacement", "num_samples")),
    (WeightedRandomSampler, ("replacement", "num_samples")),
    (DistributedSampler, ("num_replicas", "shuffle", "seed", "drop_last")),
)
"""What torch's samplers are described by."""


def describe(loader: Any) -> dict[str, Any]:
    """What must be equal of two loaders for the state of one to mean something to the other."""
    shard = shared(loader)
    samplers = {path: _described(one, shard) for path, one in samplers_of(loader).items()}
    iterable = isinstance(loader.dataset, IterableDataset)
    asked = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return {
        "dataset": None if iterable else _length(loader.dataset),
        "batch_size": _batch_size(loader),
        "drop_last": loader.drop_last,
        **samplers,
        "batches": None if iterable else _length(asked),
        "seed": loader.seed,
        "persistent_workers": loader.persistent_workers,
        **({"num_workers": loader.num_workers} if iterable else {}),
        **({"ranks": shard.num_replicas, "rank": shard.rank} if shard else {}),
    }


_OF_RANKS = ("ranks", "rank", "batch_size", "batches")
"""What of that may differ where the state is that of all ranks."""


def _batch_size(loader: Any) -> int | None:
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else loader.batch_size


def _described(sampler: Any, shard: DistributedSampler[Any] | None) -> str:
    if shard is not None and sampler is shard:
        name = "distributed='auto': DistributedSampler" if type(shard) is Shard else type(shard).__name__
        values = f"shuffle={shard.shuffle}, seed={shard.seed}, drop_last={shard.drop_last}"
        return f"{name}({values}) of {_length(cast('Sized', shard.dataset))} samples"
    if type(sampler) is BatchSampler:
        return f"BatchSampler(drop_last={sampler.drop_last})"
    for kind, names in _ABOUT:
        if isinstance(sampler, kind):
            values = ", ".join(f"{name}={getattr(sampler, name, None)!r}" for name in names)
            return f"{type(sampler).__name__}({values})"
    length = _length(sampler)
    return type(sampler).__name__ if length is None else f"{type(sampler).__name__} of {length}"


def _length(sized: Sized) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def stateful_among(loader: Any) -> dict[str, Any]:
    """The sampler that says its state as torchdata's ``StatefulDataLoader`` asks for it, by where it is."""
    for path, sampler in samplers_of(loader).items():
        if is_stateful(sampler):
            return {path: sampler}
        if type(sampler) is not BatchSampler:
            break
    return {}


def is_stateful(one: Any) -> bool:
    """Whether an object has torchdata's two methods."""
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


def epochs_of(loader: Any, to_come: bool = False) -> dict[str, dict[str, Any]]:
    """The epochs of the samplers that are told theirs; of those that count them, the one that is ``to_come``."""
    return {
        path: {"epoch": one.next_epoch if to_come and isinstance(one, Shard) else int(one.epoch)}
        for path, one in samplers_of(loader).items()
        if hasattr(one, "set_epoch") and isinstance(getattr(one, "epoch", None), int)
    }


def state_of(loader: Any, place: EpochProgress | None, epochs: int, used: set[str]) -> dict[str, Any]:
    """The state of a loader.

    Args:
        loader: The loader.
        place: Where its latest epoch is; None before the first.
        epochs: How many were begun.
        used: Names of the generators that were seen to be drawn from.
    """
    begun = place if place and (not place.over or _stays(loader, place)) else None
    # A sampler may have made a generator in the epoch that is over.
    generators = begun.generators if begun else Generators(loader)
    names, shard = generators.always | used, shared(loader)
    now = _text({name: state for name, state in generators.states().items() if name in names})
    if begun:
        place, samplers, states, first = begun, begun.samplers, begun.sampler_states(), begun.first
        made = _text({name: state for name, state in begun.made.items() if name in names})
    else:
        samplers, made = epochs_of(loader, to_come=True), now
        states = first = {path: one.state_dict() for path, one in stateful_among(loader).items()}
        # Where workers persist, so does the base seed, and the sampler is asked for one iterator.
        seed = place.base_seed if place and loader.persistent_workers else None
        place = EpochProgress(generators, {}, epochs, seeded=seed is None, base_seed=seed)
    return {
        "version": VERSION,
        "loader": describe(loader),
        "begun": begun is not None,
        "over": begun is not None and begun.over,
        "epoch": place.epoch,
        "start": place.start,
        "reached": reached(shard, place.start, place.delivered * (_batch_size(loader) or 1)) if shard else 0,
        "batches": place.delivered,
        "asked": place.delivered if isinstance(loader.dataset, IterableDataset) else place.asked,
        "iterators": place.iterators,
        "base_seed": place.base_seed,
        "base_seed_drawn": place.seeded,
        "samplers": copy.deepcopy(
            {
                path: samplers.get(path, {})
                | ({"state": states[path], "state_at_begin": first[path]} if path in states else {})
                for path in dict.fromkeys([*samplers, *states])
            }
        ),
        "generators": now,
        "generators_at_begin": made,
        "draws": [[asked, _text(found)] for asked, found in place.draws],
        "worker": place.worker,
        "workers": [[worker, *astuple(stream)] for worker, stream in place.streams.items()],
    }


def _stays(loader: Any, place: EpochProgress) -> bool:
    """Whether a stream that has a state is asked again in the next epoch, and not a copy of what the user made."""
    return (loader.persistent_workers or not loader.num_workers) and any(one.known for one in place.streams.values())


def _text(states: States) -> dict[str, str]:
    return {name: to_text(state) for name, state in states.items()}


def checked(state: Mapping[str, Any], loader: Any) -> Checkpoint:
    """A state of this version that this loader can go on from.

    Raises:
        ValueError: It is of another loader, or damaged. The text says what differs.
    """
    state, ours = _of_rank(state, loader), describe(loader)
    theirs = cast("dict[str, Any]", state.get("loader", {}))
    differing = [
        f"{name} is {theirs.get(name, 'none')!r} in the state and {ours.get(name, 'none')!r} here"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name, "none") != ours.get(name, "none")
    ]
    if differing:
        raise ValueError(f"the state is of another loader: {'; '.join(differing)}{_advice(theirs, loader)}")
    try:
        saved = Checkpoint(
            copy.deepcopy(dict(state)),
            _decoded(state["generators"]),
            _decoded(state["generators_at_begin"]),
            [(int(number), _decoded(states)) for number, states in state["draws"]],
            {worker: StreamProgress(*copy.deepcopy(about)) for worker, *about in state["workers"]},
        )
        for name in _NEEDED:
            saved.given[name]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"this is no state of a DALILoader, or a damaged one: {error!r}") from error
    known = Generators(loader)
    missing = {*saved.now, *saved.made} - {*known.own, *known.late, *known.shared}
    if missing:
        raise ValueError(f"the state has generators that this loader has not: {', '.join(sorted(missing))}")
    return saved


def _advice(theirs: Mapping[str, Any], loader: Any) -> str:
    """What helps against a difference in ranks."""
    ranks, shard = theirs.get("ranks"), shared(loader)
    if ranks and (shard is None or shard.num_replicas != ranks):
        return f". torchdali.state.merge makes one of those of all {ranks} ranks, which any number of ranks can load"
    if shard is None and loader.distributed and str(theirs.get("sampler")).startswith("distr"):
        return ". Call torch.distributed.init_process_group before; a process alone is a group of size 1"
    return ""


def check_version(state: object) -> None:
    """Raises where a state is none, or none of this version."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is the dictionary that state_dict() returned, not {type(state).__name__}")
    version = cast("Mapping[str, Any]", state).get("version")
    if version != VERSION:
        foreign = "; no DALILoader made it" if version is None else ""
        raise ValueError(f"the state is of version {version!r}, this torchdali reads version {VERSION}{foreign}")


_OWN: dict[str, Any] = {"base_seed": None, "base_seed_drawn": True, "generators": {}, "generators_at_begin": {}}
"""What each rank has for itself; so a rank has it of which nothing is known."""


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Makes one state of those of all ranks, from which loaders on any number of ranks go on.

    The loaders have ``distributed="auto"`` or a ``DistributedSampler``. What is left of the epoch is shared by its
    arithmetic: every sample that no rank has delivered comes once, with the augmentation that it would have had.

    Args:
        states: What ``state_dict()`` returned on each rank, in any order, after as many batches on all of them.

    Returns:
        A state as plain as they are. It is loaded by ``load_state_dict()`` on every rank.

    Raises:
        ValueError: A rank's state is missing, or they are not of the same place; the text says what differs.
        TypeError: It is one state and no list of them, or what is in the list is none.
    """
    if isinstance(states, Mapping):
        raise TypeError("this is one state; merge() takes a list of those of all ranks")
    given: list[dict[str, Any]] = []
    for state in states:
        check_version(state)
        given.append(copy.deepcopy(dict(state)))
    if not given:
        raise ValueError("there are no states to be merged; merge() takes a list of those of all ranks")
    for state in given:
        if "rank" not in state.get("loader", {}):
            raise ValueError(
                "a state to be merged is that of one rank, of a loader with distributed='auto' in a process group or "
                "with a DistributedSampler; this one is not"
            )
    given.sort(key=lambda state: state["loader"]["rank"])
    there, wanted = [state["loader"].pop("rank") for state in given], given[0]["loader"]["ranks"]
    if there != list(range(wanted)):
        raise ValueError(f"there are states of ranks {there}, and there should be one of each from 0 to {wanted - 1}")
    first = given[0]
    for rank, state in enumerate(given):
        for name in ("loader", "begun", "epoch", "samplers", "start", "batches"):
            if state[name] != first[name]:
                raise ValueError(
                    f"the states are not of the same place: {name} is {first[name]!r} on rank 0 and {state[name]!r} on "
                    f"rank {rank}; take them after as many batches on all ranks"
                )
    own = [{name: state[name] for name in _OWN} for state in given]
    return {
        **{name: value for name, value in first.items() if name not in _OWN},
        "loader": {name: value for name, value in first["loader"].items() if name not in _OF_RANKS},
        "start": first["reached"],
        "batches": 0,
        "asked": 0,
        "draws": [],
        "ranks": wanted,
        "of_ranks": own if any(one != own[0] for one in own) else own[:1],
    }


def _of_rank(state: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    """The state of this rank, where it is that of all of them, or of another one, which is as far in its own share."""
    if "of_ranks" not in state:
        about, here = state.get("loader", {}), describe(loader)
        return {**state, "loader": {**about, "rank": here["rank"]}} if "rank" in about and "rank" in here else state
    of_ranks: list[dict[str, Any]] = state["of_ranks"]
    own, shard, here = of_ranks[0], shared(loader), describe(loader)
    if len(of_ranks) > 1 and shard:
        own = of_ranks[shard.rank] if shard.num_replicas == state["ranks"] else _OWN
        seeds = {one["base_seed"] for one in of_ranks}
        if own is _OWN and state["begun"] and loader.seed is None and len(seeds) > 1:
            raise ValueError(
                f"each of the {state['ranks']} ranks had random numbers of its own, so that samples cannot look the "
                f"same on {shard.num_replicas} ranks: give seed=, or the same torch.manual_seed on each rank"
            )
    about = state["loader"] | {name: here[name] for name in _OF_RANKS if name in here}
    rest = {name: value for name, value in state.items() if name not in ("ranks", "of_ranks")}
    return {**rest, **own, "loader": about}


def _decoded(states: Mapping[str, str]) -> States:
    return {name: from_text(text) for name, text in states.items()}
