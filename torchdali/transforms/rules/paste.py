"""Rule of pasting the image on a larger canvas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchdali.transforms.augment import Paste
from torchdali.transforms.rng import Draws
from torchdali.transforms.rules.augment import draw_ranges, list_drawn
from torchdali.transforms.rules.crop import resolve_fill
from torchdali.transforms.rules.random_resize import RandomZoomOut
from torchdali.transforms.spec import IntArray, Params, Spec
from torchdali.transforms.targets import Targets


class PasteRule(RandomZoomOut):
    """Rule of Paste. Only what is drawn differs from RandomZoomOut."""

    handles = (Paste,)

    def infer(self, spec: Spec) -> Spec:
        self.fill = resolve_fill(self.transform, spec)
        self.randomness = ", ".join(list_drawn(self.transform))
        return replace(spec.with_fill(self.fill), size=None)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        numbers = draw_ranges(self.transform, draws)
        start, canvas = self.transform.find_canvas(size, numbers)
        return {**numbers, "start": (-start).astype(np.int32), "shape": canvas.astype(np.int32)}

    def find_mask_fill(self, targets: Targets) -> float:
        return 0
