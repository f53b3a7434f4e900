"""What a run of a pipeline leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchdali.pipeline import graph

PPM = np.frombuffer(b"P6 2 1 255 " + bytes(6), np.uint8)


@pytest.mark.slow
def test_a_run_leaves_no_garbage_in_cycles() -> None:
    """DALI's own methods define a class in each call."""
    pipeline = graph.build_header_validator(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            pipeline.feed_images(graph.HEADERS, [PPM])
            pipeline.schedule_run()
            pipeline.share_outputs()
            pipeline.release_outputs()
        assert gc.collect() == 0
    finally:
        gc.enable()
        pipeline.close()


@pytest.mark.parametrize("make", [lambda array: [array, array], lambda array: np.stack([array] * 2)])
def test_dali_drops_no_array_while_what_was_fed_is_kept(make: Callable[..., Any]) -> None:
    """Its thread would wait for the interpreter's lock."""
    pipeline = graph.build_header_validator(2)
    images = make(PPM.copy())
    arrays = [weakref.ref(array) for array in (images if isinstance(images, list) else [images])]
    kept = pipeline.feed_images(graph.HEADERS, images)
    del images
    pipeline.schedule_run()
    pipeline.share_outputs()
    pipeline.release_outputs()
    assert all(array() is not None for array in arrays)
    del kept
    assert all(array() is None for array in arrays)
    pipeline.close()
