"""What a run of a pipeline leaves behind."""

from __future__ import annotations

import gc

import numpy as np

from torchdali.pipeline import graph


def test_a_run_leaves_no_garbage_in_cycles() -> None:
    """DALI's own methods define a class in each call."""
    pipeline = graph.build_header_validator(1)
    ppm = np.frombuffer(b"P6 2 1 255 " + bytes(6), np.uint8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            pipeline.feed_arrays(graph.HEADERS, [ppm])
            pipeline.schedule_run()
            pipeline.share_outputs()
            pipeline.release_outputs()
        assert gc.collect() == 0
    finally:
        gc.enable()
        pipeline.close()
