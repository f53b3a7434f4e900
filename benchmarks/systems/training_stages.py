"""Run a pipeline that ends after one of its stages beside a training step on one batch, to measure the stage's cost.

The step does not use the pipeline's output. So this is the time that GPU and host lose by reading, decoding and
transforming as many images as the step needs.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.systems import systems

STAGES = {
    "stage_read": "only reading the files, beside a step on one batch",
    "stage_decode": "reading and decoding, beside a step on one batch",
    "stage_all": "reading, decoding and transforming, beside a step on one batch",
}
_IN_FLIGHT = 3


def make_stage(name: str, root: Path, batch_size: int, step: list[Any]) -> systems.Epoch:
    """Return epochs that yield `step`, while the pipeline runs up to a stage."""
    import numpy as np
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader
    from torchdali.loader import probe
    from torchdali.pipeline.engine import PipelineRunner
    from torchdali.transforms.rng import Draws, epoch_key
    from torchdali.transforms.spec import InputKind

    compiled = DALILoader(ImageFolder(root, systems.make_transforms()), batch_size)._native_plan()  # noqa: SLF001
    reader, full_plan = compiled.reader, compiled.plan
    plan = {
        "stage_read": probe.plan_reading(full_plan),
        "stage_decode": replace(probe.plan_decoding(full_plan), input_kind=InputKind.FILES),
        "stage_all": full_plan,
    }[name]
    with ThreadPoolExecutor(16) as threads:
        reader.scan(np.arange(len(reader.source)), lambda: threads).wait()
    engine = PipelineRunner(plan, batch_size, compiled.threads.choose(reader.input_stats()))
    rng = np.random.default_rng(0)

    def submit(rows: Any) -> None:
        inputs, _ = full_plan.draw(Draws(epoch_key(0, 0), rows, np.zeros_like(rows)), reader.sizes(rows))
        # The pictures are JPEGs, so PIL decodes none.
        engine.submit(reader.read_inputs(rows, {}, None), {name: inputs[name] for name in plan.inputs})

    def epoch() -> Iterator[Any]:
        rows = rng.permutation(len(reader.source))
        for start in range(0, len(rows) - batch_size + 1, batch_size):
            submit(rows[start : start + batch_size])
            if engine.in_flight > _IN_FLIGHT:
                engine.take()
            yield step

    return epoch
