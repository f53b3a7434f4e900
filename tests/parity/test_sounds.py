"""torchaudio's transforms in DALI: equal within bounds, with torchaudio's own random masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchaudio.transforms as T
from torch import nn
from torchvision.transforms import v2

from torchdali.pipeline.compile import compile_plan
from torchdali.pipeline.plan import Plan
from torchdali.tools.parity import results
from torchdali.tools.parity.case import GroupCase
from torchdali.tools.parity.groups import GROUPS
from torchdali.tools.parity.report import list_rules
from torchdali.tools.parity.sounds import SOUNDS, _Sounds, measure_sounds
from torchdali.transforms import SampleTransformError, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.sounds import TorchaudioRule
from torchdali.transforms.spec import InputKind, Spec

WAVEFORM = Spec("waveform", torch.float32, 1, unit=False)
STEREO = Spec("waveform", torch.float32, 2, unit=False)


def plan_of(*chain: Any, spec: Spec = WAVEFORM) -> Plan:
    return compile_plan(list(chain), torch.device("cpu"), "exact", spec, InputKind.PIXELS)


def run_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchaudioRule, "is_on_host", property(lambda _: False, lambda *_: None), raising=False)


@pytest.mark.parametrize("name", SOUNDS)
def test_bounds(name: str, device: str) -> None:
    assert not GROUPS["sounds"].find_exceeded(SOUNDS[name], measure_sounds(SOUNDS[name], None, device))
    assert bool(SOUNDS[name].why) == (SOUNDS[name].bounds[0] > 0)


@pytest.mark.parametrize("name", SOUNDS)
def test_bounds_of_what_a_gpu_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI's operators are the same on both devices, but on a CPU torchaudio takes their place."""
    run_as_on_a_gpu(monkeypatch)
    assert not GROUPS["sounds"].find_exceeded(SOUNDS[name], measure_sounds(SOUNDS[name], None, "cpu"))


def test_several_channels(device: str) -> None:
    case = SOUNDS["sounds of a training"]
    assert not GROUPS["sounds"].find_exceeded(case, measure_sounds(case, None, device, channels=2))


def test_quiet_decibels_of_torchaudio_differ_as_much_from_those_of_float64() -> None:
    """So no bound below this can hold for another Fourier transform of float32, such as a GPU's."""
    wrong = 0.0
    sounds = _Sounds(1, torch.Tensor.double)
    for waveform in (sounds[i] for i in range(len(sounds))):
        decibels = T.AmplitudeToDB(top_db=80.0)
        exact = decibels(T.Spectrogram().double()(waveform))
        wrong = max(wrong, float((decibels(T.Spectrogram()(waveform.float())) - exact).abs().max() / exact.abs().max()))
    assert 2e-5 < wrong < SOUNDS["sounds AmplitudeToDB, top_db"].bounds[0]


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_on_a_gpu(monkeypatch)
    case = GroupCase(SOUNDS["sounds Spectrogram"].chain, (1e-8,))
    found = results.Results()
    of_device = found.select_device("cpu", results.Machine())
    of_device.groups["sounds"]["sounds Vol"] = results.GroupResult("", measure_sounds(case, None, "cpu"))
    (failure,) = results.find_failures(found)
    assert failure.startswith("sounds Vol on cpu: largest ")


def test_every_rule_is_in_a_case() -> None:
    of_torchaudio = {one.rpartition(".")[2] for one in list_rules() if str(one).startswith("torchaudio.")}
    tried = {part.name for case in SOUNDS.values() for part in case.chain}
    assert of_torchaudio - tried == {"Resample", "Vad"}


def change_filters(mel: Any) -> Any:
    mel.fb[0, 0] = 1
    return mel


def change_matrix(mfcc: Any) -> Any:
    mfcc.dct_mat[0, 0] = 2
    return mfcc


def change_reference(decibels: Any) -> Any:
    decibels.db_multiplier = 1.0
    return decibels


MEL = {"n_mels": 40}
IN_TORCH: list[tuple[list[Any], str]] = [
    ([T.Spectrogram(power=None)], "for each sample after DALI: power=None"),
    ([T.Spectrogram(power=3.0)], "power=3.0: DALI's spectrograms have power 1 or 2"),
    ([T.Spectrogram(pad=4)], "pad=4"),
    ([T.Spectrogram(onesided=False)], "one side"),
    ([T.Spectrogram(4)], "n_fft=4 is below 8"),
    ([T.Spectrogram(401)], "odd length, n_fft=401"),
    ([T.Spectrogram(pad_mode="replicate")], "pad_mode='replicate'"),
    ([T.Spectrogram(), change_filters(T.MelScale(40))], "its filters are not those that its arguments make"),
    ([T.Spectrogram(), change_reference(T.AmplitudeToDB())], "its reference is not 1"),
    ([T.MelSpectrogram(n_mels=40, power=3.0)], "power=3.0"),
    ([T.MFCC(log_mels=True, melkwargs=MEL)], "log_mels=True"),
    ([T.MFCC(norm=None, melkwargs=MEL)], "norm=None: DALI's transform has another scale"),
    ([change_matrix(T.MFCC(melkwargs=MEL))], "its matrix is not the one that its arguments make"),
    ([T.Vol(0.0, "power")], "torchaudio refuses a gain of power that is 0"),
    ([T.Resample(16_000, 8000)], "for whole batches after DALI: DALI's resampling has no low-pass filter"),
    ([T.Resample(8000, 16_000)], "differs from torchaudio's by up to 0.5 %"),
    ([T.Vad(16_000)], "for each sample after DALI: DALI's nonsilent_region"),
    ([T.FrequencyMasking(9)], "for each sample after DALI: it takes spectrograms of float32, not float32 (1, T)"),
    ([T.Spectrogram(), T.Vol(0.5)], "it takes waveforms of float32"),
    ([T.MelScale(40)], "it takes spectrograms of float32, not float32 (1, T)"),
]


@pytest.mark.parametrize(("chain", "reason"), IN_TORCH, ids=[reason for _, reason in IN_TORCH])
def test_refused_arguments_say_why(chain: list[Any], reason: str) -> None:
    *before, last = plan_of(*chain).steps
    assert all(step.library == "DALI" for step in before)
    assert last.library == "torch"
    assert reason in last.note


def test_masks_of_each_channel_run_in_torch() -> None:
    chain = [T.Spectrogram(), T.TimeMasking(9, iid_masks=True)]
    assert not plan_of(*chain).needs_torch
    assert "iid_masks=True" in plan_of(*chain, spec=STEREO).steps[-1].note


def test_what_follows_in_torch_takes_whole_batches() -> None:
    chain = [T.Resample(16_000, 8000), T.Vol(0.5), T.MelSpectrogram(8000, n_mels=40), T.AmplitudeToDB()]
    plan = plan_of(*chain)
    assert len(plan.tail) == 4
    assert (plan.spec.kind, plan.spec.channels) == ("tensor", 1)
    # torchaudio takes the sounds of a batch for the channels of one spectrogram.
    plan = plan_of(chain[0], T.AmplitudeToDB(top_db=80), chain[1])
    assert [len(plan.tail), len(plan.suffix)] == [1, 2]


@pytest.mark.parametrize(
    ("masking", "most"), [(T.FrequencyMasking(9), 9), (T.TimeMasking(30, p=0.4), 16), (T.TimeMasking(0), 0)]
)
def test_masks_are_drawn_as_torchaudio_draws_them(masking: Any, most: int) -> None:
    """Each length below the largest is equally likely; a start is uniform over the places that are left."""
    rule = find_rule(masking)
    assert rule
    rule.infer(Spec("tensor", torch.float32, 1, unit=False))
    numbers = torch.arange(4000).numpy()
    drawn = rule.draw(Draws(epoch_key(0, 0), numbers, 0 * numbers), torch.tensor([[40, 40]]).repeat(4000, 1).numpy())
    length, start = drawn["shape"][:, 0].astype(int), drawn["anchor"][:, 0].astype(int)
    counts = torch.bincount(torch.from_numpy(length), minlength=most)
    assert len(counts) == max(most, 1)
    assert (counts > 0.7 * 4000 / max(most, 1)).all()
    assert (start >= 0).all()
    assert (start + length <= 40).all()
    if most:
        assert start[length == 0].max() > 36
        assert abs(start[length == most - 1].mean() - (40 - most + 0.5) / 2) < 3


def test_chains_of_any_depth() -> None:
    plan = plan_of(
        nn.Sequential(v2.Compose([T.Vol(0.5)]), nn.Sequential(T.MelSpectrogram(n_mels=40))), T.TimeMasking(9)
    )
    assert [step.library for step in plan.steps] == ["DALI"] * 3
    assert plan.steps[-1].randomness == "length and start of the mask"
    assert "Spectrogram by torchaudio, MelScale by torchaudio; erase" in str(plan)


@pytest.mark.parametrize(
    ("transform", "size", "message"),
    [
        (T.Spectrogram(), (1, 200), "a sound of 200 samples is too short for n_fft=400, which needs 201"),
        (T.Spectrogram(center=False), (1, 399), "too short for n_fft=400, which needs 400"),
        (T.Spectrogram(pad_mode="constant"), (1, 0), "too short for n_fft=400, which needs 1"),
        (T.Fade(30, 50), (1, 49), "a sound of 49 samples is shorter than the fade, 50"),
        (T.MelScale(40), (200, 9), "n_stft=201, and the spectrogram has 200 frequencies"),
    ],
)
def test_torchaudio_refuses_the_same_sounds(transform: Any, size: tuple[int, int], message: str) -> None:
    height, width = size
    rule = find_rule(transform)
    assert rule
    rule.infer(WAVEFORM if height == 1 else Spec("tensor", torch.float32, 1, unit=False))
    draws = Draws(epoch_key(0, 0), torch.arange(2).numpy(), torch.zeros(2, dtype=torch.int64).numpy())
    sizes = torch.tensor([[height + (height > 1), width + (height == 1)], [height, width]]).numpy()
    with pytest.raises(SampleTransformError, match=message) as raised:
        rule.draw(draws, sizes)
    assert raised.value.row == 1
    one = torch.ones(1, width) if height == 1 else torch.ones(1, height, width)
    with pytest.raises(RuntimeError):
        transform(one)
    larger = torch.ones(1, width + 1) if height == 1 else torch.ones(1, height + 1, width)
    transform(larger)
