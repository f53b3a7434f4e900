"""Find the random generators that a loader and its samplers draw from, and save and restore their states."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler  # pyright: ignore[reportPrivateUsage]

from torchdali.state.schema import refuse_damaged
from torchdali.state.sharding import Shard
from torchdali.transforms.rng import draw_seed

__all__ = ["TORCH", "Generators", "State", "States", "count_batches", "find_samplers", "from_text", "to_text"]

State = Any
"""A generator's state in memory: bytes for torch's, and for others a value that is fast to compare."""
States = dict[str, State]

TORCH = "torch"
_NON_TORCH: dict[str, Any] = {"python": random, "numpy": np.random}
_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_KNOWN_SAMPLERS = (
    *(*_RANDOM_SAMPLERS, SequentialSampler, BatchSampler, DistributedSampler, _InfiniteConstantSampler),
    *(Shard, list, tuple, range, torch.Tensor, np.ndarray),
)
"""Exactly these types are known to draw from torch's generators or from none."""
_GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
"""A state names one of these. No other word of a state is looked up."""


def find_samplers(loader: Any) -> dict[str, Any]:
    """Return a loader's samplers by their paths: first the one that the loader iterates over, then those inside it."""
    first = "sampler" if loader.batch_sampler is None else "batch_sampler"
    samplers: dict[str, Any] = {}
    queue: list[tuple[str, Any]] = [(first, getattr(loader, first)), ("sampler", loader.sampler)]
    while queue:
        path, sampler = queue.pop(0)
        if any(sampler is other for other in samplers.values()):
            continue
        samplers[path] = sampler
        for name, value in _attributes(sampler):
            # Ask the class: an object that looks its attributes up in a dictionary may raise KeyError.
            if (
                _is_sampler(value)
                or hasattr(cast("Any", type(value)), "set_epoch")
                or name in ("sampler", "batch_sampler")
            ):
                # The loader's own sampler comes last, under its short name.
                queue.insert(0, ("sampler" if value is loader.sampler else f"{path}.{name}", value))
    return samplers


def count_batches(sampler: Any) -> int | None:
    """Return how many batches torch's samplers give; None for others, whose ``len()`` may draw random numbers."""
    is_known = type(sampler) is BatchSampler and type(sampler.sampler) in _KNOWN_SAMPLERS
    return len(sampler) if is_known else None


def _is_sampler(value: object) -> bool:
    return isinstance(value, Sampler)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    return list(cast("dict[str, Any]", getattr(owner, "__dict__", {})).items())


class Generators:
    """The generators that a loader's order may depend on, by their names.

    Args:
        loader: The ``DataLoader``.

    Attributes:
        own: Generators that were given to the loader or are attributes of its samplers.
        lazy: Samplers that may make a generator later, by the name that the generator will have.
        shared: The global generators that a sampler may draw from.
        non_torch: Names of the global generators that are not torch's.
        required: Names of the generators that every state of the loader contains, drawn from or not.
        stateless: The classes of generators of samplers whose states cannot be read, by their names.
    """

    def __init__(self, loader: Any) -> None:
        samplers = find_samplers(loader)
        attributes = [("generator", loader.generator)]
        attributes += [(f"{path}.{name}", value) for path, x in samplers.items() for name, value in _attributes(x)]
        self._seeds: torch.Generator | None = loader.generator
        self.own: dict[str, Any] = {}
        self.stateless: dict[str, str] = {}
        for name, value in attributes:
            known = [torch.default_generator, *self.own.values()]
            if not isinstance(value, _GENERATOR_TYPES) or any(value is other for other in known):
                continue
            if _is_readable(value):
                self.own[name] = value
            else:
                self.stateless[name] = type(value).__name__
        self.lazy: dict[str, Any] = {
            f"{path}.{name}": sampler
            for path, sampler in samplers.items()
            if type(sampler) not in _KNOWN_SAMPLERS
            for name, value in _attributes(sampler)
            if value is None
        }
        self.shared: dict[str, Any] = {TORCH: torch.default_generator}
        if not all(type(sampler) in _KNOWN_SAMPLERS for sampler in samplers.values()):
            self.shared |= {name: generator for name, generator in _NON_TORCH.items() if _is_readable(generator)}
        self.non_torch = self.shared.keys() - {TORCH}
        from_torch = (
            loader.generator is None
            or len(self.shared) > 1
            or any(isinstance(x, _RANDOM_SAMPLERS) and cast("Any", x).generator is None for x in samplers.values())
        )
        self.required = {*self.own, *([TORCH] if from_torch else [])}

    def states(self) -> States:
        """Return the present state of each generator."""
        return {name: _read(generator) for name, generator in (self.own | self.shared).items()}

    def set(self, states: Mapping[str, State]) -> None:
        """Restore the states of the named generators."""
        generators = self.own | self.shared
        for name, state in states.items():
            _write(generators[name], state)

    def make(self, states: Mapping[str, State]) -> None:
        """Make the generators that samplers make later, if there is a state for them."""
        for name in states.keys() & self.lazy.keys():
            made = _make(states[name])
            setattr(self.lazy.pop(name), name.rpartition(".")[2], made)
            self.own[name] = made

    def find_unrepeatable(self, loader: Any) -> str | None:
        """Return the name of a generator that a sampler has made since, and would make with another state again.

        A state from the same epoch cannot have it: nothing tells the state that it was made with.
        """
        present, samplers = Generators(loader), find_samplers(loader)
        for name in present.own.keys() - self.own.keys():
            path, _, attribute = name.rpartition(".")
            if path in samplers and not _is_made_alike(samplers[path], attribute, present):
                return name
        return None

    def check(self, states: Mapping[str, State]) -> None:
        """Raise ValueError if a state cannot be restored. Try it on another generator, so that none changes."""
        generators = self.own | self.shared
        for name, state in states.items():
            try:
                replica = _make(state)
                _write(replica, state)
            except Exception as error:  # noqa: BLE001 - the generators raise various classes
                refuse_damaged(f"the state of the generator {name}: {error!r}", error)
            if name in generators and type(replica) is not type(_make(_read(generators[name]))):
                kind = type(generators[name]).__name__
                refuse_damaged(f"{name} must be the state of a {kind}, got that of a {type(replica).__name__}")

    def draw_seed(self) -> int:
        """Draw a base seed for workers as DataLoader does."""
        return draw_seed(self._seeds)


def _is_made_alike(sampler: Any, attribute: str, generators: Generators) -> bool:
    """Return whether two copies of a sampler make generators of equal states. All generators stay as they are."""
    states, made = generators.states(), list[State]()
    try:
        for _ in range(2):
            twin = copy.copy(sampler)
            setattr(twin, attribute, None)
            next(iter(twin), None)
            made.append(_read(getattr(twin, attribute)))
            generators.set(states)
    except Exception:  # noqa: BLE001 - a sampler may raise anything
        return False
    finally:
        generators.set(states)
    return made[0] == made[1]


def _read(generator: Any) -> State:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())
    if hasattr(generator, "getstate"):
        return generator.getstate()
    saved = generator.get_state(legacy=False)
    return (
        saved["bit_generator"],
        saved["state"]["key"].tobytes(),
        saved["state"]["pos"],
        saved["has_gauss"],
        saved["gauss"],
    )


def _is_readable(generator: Any) -> bool:
    """Return whether a state can be read. SystemRandom has none, and RandomState may have another algorithm inside."""
    try:
        _read(generator)
    except (NotImplementedError, KeyError):
        return False
    return True


def _make(state: State) -> Any:
    """Return a new generator of the kind that the state belongs to."""
    if isinstance(state, bytes):
        return torch.Generator()
    if isinstance(state, str):
        return np.random.Generator(_BIT_GENERATORS[json.loads(state)["bit_generator"]]())
    return np.random.RandomState() if isinstance(state[0], str) else random.Random()


def _write(generator: Any, state: State) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = json.loads(state)
    elif hasattr(generator, "setstate"):
        version, words, rest = state
        generator.setstate((version, tuple(words), rest))
    else:
        name, key, *rest = state
        generator.set_state((name, np.frombuffer(key, np.uint32), *rest))


def to_text(state: State) -> str:
    """Encode a state as base64 text."""
    if not isinstance(state, bytes):
        state = b"json" + json.dumps(state, default=lambda data: base64.b64encode(data).decode()).encode()
    return base64.b64encode(state).decode()


def from_text(text: str) -> State:
    """Decode the text that :func:`to_text` returned."""
    state = base64.b64decode(text, validate=True)
    if not state.startswith(b"json"):
        return state
    plain: Any = json.loads(state[4:])
    if isinstance(plain, list) and isinstance(plain[0], str):  # numpy's
        name, key, *rest = cast("list[Any]", plain)
        return (name, base64.b64decode(key), *rest)
    return cast("Any", plain)
