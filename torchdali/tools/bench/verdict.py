"""What the measured numbers mean for the one who measured: the bottleneck, and whether torchdali would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchdali.loader.stats import Bottleneck, Probe
from torchdali.loader.verdict import decoding, model, storage, transforms
from torchdali.pipeline.clock import WAIT_THRESHOLD

__all__ = ["Verdict", "verdict"]

_NO_FASTER = 1.1
"""Times as fast as DataLoader, below which it is not worth changing anything."""
_KEEPS_UP = 0.97
"""The share of the ceiling from which on the model is the bottleneck."""
_IMPOSSIBLE = 1.05
"""Times the ceiling, above which something else was at work while it was measured."""
_BUSY = 0.9
"""The share of the cores that are busy where they are the bottleneck."""

_AGAIN = "measure again with nothing else on the machine"
_WORK = {"decoding": "decoding", "transforms": "the transforms in DALI"}

_IN_THREAD = {
    "torch": "transforms that run in torch are the bottleneck: `torchdali explain` names them",
    "collate": "the iterating thread is the bottleneck: labels and default_collate",
    "host": "the iterating thread is the bottleneck: drawing parameters and feeding DALI",
}

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What the bottleneck is, and what to do about it.

    Attributes:
        bottleneck: what keeps DALILoader from being faster; "cores": all of them are busy.
        helps: whether DALILoader is faster than DataLoader where it counts: alone, or beside the model if one was
            given.
        sentence: it in words.
    """

    bottleneck: Bottleneck | str
    helps: bool
    sentence: str


def verdict(runs: Mapping[str, Run], trained: Mapping[str, Run], cores: int) -> Verdict:
    """Judges what was measured.

    Args:
        runs: of loaders alone, those that were measured, with DALILoader's, and at least one of DataLoader's.
        trained: the same beside a training step, with the synthetic one; empty where nothing trained.
        cores: how many there were.
    """
    ours = runs["torchdali"]
    theirs = _best(runs)
    if trained:
        ceiling, with_ours, with_theirs = trained["synthetic"], trained["torchdali"], _best(trained)
        top = ceiling["images_per_s"]
        fastest = max(with_ours["images_per_s"], with_theirs["images_per_s"])
        if fastest > _IMPOSSIBLE * top:
            said = f"{fastest:,.0f} images/s beside the model, which made {top:,.0f} with a batch that lay there"
            return Verdict("not measured", False, f"these figures contradict each other: {said}; {_AGAIN}")
        if with_theirs["images_per_s"] >= _KEEPS_UP * top:
            saved = f"{_cpu(with_theirs)} CPU-seconds for 1,000 images instead of {_cpu(with_ours)}"
            said = f"{model(with_theirs['images_per_s'], theirs['images_per_s'])}; DataLoader keeps up, with {saved}"
            return Verdict("model", False, f"torchdali would not help: {said}")
        gain = with_ours["images_per_s"] / with_theirs["images_per_s"]
        if with_ours["images_per_s"] >= _KEEPS_UP * top:
            said = model(with_ours["images_per_s"], ours["images_per_s"])
            return Verdict("model", gain >= _NO_FASTER, f"with torchdali {said}; {_gain(gain, 'it trains')}")
        if with_ours["waiting_share"] < WAIT_THRESHOLD:
            said = model(with_ours["images_per_s"], ours["images_per_s"])
            beside = f"loading on the same GPU and cores costs it {1 - with_ours['images_per_s'] / top:.0%}"
            return Verdict("model", gain >= _NO_FASTER, f"with torchdali {said}; {beside}; {_gain(gain, 'it trains')}")
        bottleneck, said = _find_bottleneck(ours, cores)
        share = f"{with_ours['images_per_s'] / top:.0%} of what the model could take"
        return Verdict(bottleneck, gain >= _NO_FASTER, f"{said}: {share}; {_gain(gain, 'torchdali trains')}")
    gain = ours["images_per_s"] / theirs["images_per_s"]
    bottleneck, said = _find_bottleneck(ours, cores)
    return Verdict(bottleneck, gain >= _NO_FASTER, f"{said}; {_gain(gain, 'torchdali loads')}")


def _best(runs: Mapping[str, Run]) -> Run:
    return max((run for name, run in runs.items() if name in ("tensors", "pil")), key=lambda run: run["images_per_s"])


def _cpu(run: Run) -> str:
    seconds = run["cpu_s_per_1000_images"]
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"


def _gain(gain: float, what: str) -> str:
    if gain >= _NO_FASTER:
        return f"{what} {gain:.1f} times as fast as DataLoader"
    return f"torchdali would not help: {gain:.2f} times DataLoader's images/s"


def _find_bottleneck(ours: Run, cores: int) -> tuple[str, str]:
    """What keeps DALILoader from being faster, and the sentence."""
    alone = ours.get("alone")
    probe = Probe(**alone) if alone else None
    if probe is None:
        return "not measured", "what the bottleneck is could not be measured"
    if probe.bottleneck == "storage":
        return probe.bottleneck, storage(probe.read or 0.0, probe.together)
    if ours["busy_cores"] >= _BUSY * cores:
        busy = f"{ours['busy_cores']:.1f} of {cores} are busy, most of all with {_WORK.get(probe.bottleneck, 'Python')}"
        return "cores", f"the CPU cores are the bottleneck: {busy}"
    if probe.bottleneck == "decoding":
        return probe.bottleneck, decoding(probe.decode or 0.0, probe.together)
    if probe.bottleneck == "transforms":
        return probe.bottleneck, transforms(probe.transforms, probe.together)
    return probe.bottleneck, _IN_THREAD.get(
        probe.bottleneck, f"the iterating thread is the bottleneck ({probe.bottleneck})"
    )
