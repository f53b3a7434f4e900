"""Diagnose the measured figures: name the bottleneck, and tell whether torchdali would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchdali.loader.stats import Bottleneck, Probe
from torchdali.loader.verdict import describe_alone, describe_model
from torchdali.pipeline.clock import WAIT_THRESHOLD

_WORTHWHILE = 1.1
"""Speed, as a multiple of DataLoader's, from which on a change is worth it."""
_KEEPS_UP = 0.97
"""Share of the ceiling from which on the model is the bottleneck."""
_IMPOSSIBLE = 1.05
"""Multiple of the ceiling above which something else must have disturbed the measurement."""
_BUSY = 0.9
"""Share of busy cores from which on the cores are the bottleneck."""

_AGAIN = "measure again with nothing else on the machine"
_WORK = {"decoding": "decoding", "transforms": "the transforms in DALI"}

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The bottleneck, and whether torchdali helps.

    Attributes:
        bottleneck: What limits DALILoader. "cores" means that all of them are busy.
        helps: Whether DALILoader is faster than DataLoader: beside the model if one was trained, else alone.
        sentence: The verdict in words.
    """

    bottleneck: Bottleneck | str
    helps: bool
    sentence: str


def diagnose(runs: Mapping[str, Run], trained: Mapping[str, Run], cores: int) -> Verdict:
    """Return the verdict.

    Args:
        runs: Figures of loaders alone, by name: DALILoader's, and at least one of DataLoader's.
        trained: Figures beside a training step, by name, with the synthetic one. Empty without a model.
        cores: Number of cores that the loaders had.
    """
    ours, theirs = runs["torchdali"], _select_best(runs)
    if trained:
        return _diagnose_training(ours, theirs, trained, cores)
    gain = ours["images_per_s"] / theirs["images_per_s"]
    bottleneck, text = _find_bottleneck(ours, cores)
    return Verdict(bottleneck, gain >= _WORTHWHILE, f"{text}; {_describe_gain(gain, 'torchdali loads')}")


def _diagnose_training(ours: Run, theirs: Run, trained: Mapping[str, Run], cores: int) -> Verdict:
    with_ours, with_theirs = trained["torchdali"], _select_best(trained)
    top, our_rate, their_rate = (run["images_per_s"] for run in (trained["synthetic"], with_ours, with_theirs))
    fastest = max(our_rate, their_rate)
    if fastest > _IMPOSSIBLE * top:
        text = f"{fastest:,.0f} images/s beside the model, which reached only {top:,.0f} with one repeated batch"
        return Verdict("not measured", False, f"these figures contradict each other: {text}; {_AGAIN}")
    if their_rate >= _KEEPS_UP * top:
        saved = f"{_format_cpu(with_theirs)} CPU-seconds for 1,000 images instead of {_format_cpu(with_ours)}"
        text = f"{describe_model(their_rate, theirs['images_per_s'])}; DataLoader keeps up, with {saved}"
        return Verdict("model", False, f"torchdali would not help: {text}")
    gain = our_rate / their_rate
    if our_rate >= _KEEPS_UP * top or with_ours["waiting_share"] < WAIT_THRESHOLD:
        text = f"with torchdali {describe_model(our_rate, ours['images_per_s'])}"
        if our_rate < _KEEPS_UP * top:
            text += f"; loading on the same GPU and cores costs it {1 - our_rate / top:.0%}"
        return Verdict("model", gain >= _WORTHWHILE, f"{text}; {_describe_gain(gain, 'it trains')}")
    bottleneck, text = _find_bottleneck(ours, cores)
    share = f"{our_rate / top:.0%} of what the model could take"
    return Verdict(bottleneck, gain >= _WORTHWHILE, f"{text}: {share}; {_describe_gain(gain, 'torchdali trains')}")


def _select_best(runs: Mapping[str, Run]) -> Run:
    return max((run for name, run in runs.items() if name in ("tensors", "pil")), key=lambda run: run["images_per_s"])


def _format_cpu(run: Run) -> str:
    seconds = run["cpu_s_per_1000_images"]
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"


def _describe_gain(gain: float, subject: str) -> str:
    if gain >= _WORTHWHILE:
        return f"{subject} {gain:.1f} times as fast as DataLoader"
    return f"torchdali would not help: {gain:.2f} times DataLoader's images/s"


def _find_bottleneck(ours: Run, cores: int) -> tuple[str, str]:
    """Return what limits DALILoader alone, and a sentence."""
    if not ours.get("alone"):
        return "not measured", "the bottleneck could not be measured"
    probe = Probe(**ours["alone"])
    if probe.bottleneck != "storage" and ours["busy_cores"] >= _BUSY * cores:
        busy = f"{ours['busy_cores']:.1f} of {cores} are busy, most of all with {_WORK.get(probe.bottleneck, 'Python')}"
        return "cores", f"the CPU cores are the bottleneck: {busy}"
    return probe.bottleneck, describe_alone(probe)
