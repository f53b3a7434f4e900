"""What a step loses to each stage of the pipeline: one that ends after the stage runs beside a step on one batch.

The step reads nothing of what the pipeline makes. So this is what the card and the host lose by reading, decoding and
transforming as many images as the step takes, whatever hands them out.
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


def stage(name: str, root: Path, batch_size: int, step: list[Any]) -> systems.Epoch:
    """An epoch that hands out `step`, while the pipeline does its work up to a stage."""
    import numpy as np
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader
    from torchdali.loader import probe
    from torchdali.pipeline.engine import PipelineRunner
    from torchdali.transforms.rng import Draws, epoch_key
    from torchdali.transforms.spec import InputKind

    compiled = DALILoader(ImageFolder(root, systems.transforms()), batch_size)._native_plan()  # noqa: SLF001
    reader, whole = compiled.reader, compiled.plan
    plan = {
        "stage_read": probe.plan_reading(whole),
        "stage_decode": replace(probe.plan_decoding(whole), input_kind=InputKind.FILES),
        "stage_all": whole,
    }[name]
    with ThreadPoolExecutor(16) as threads:
        reader.scan(np.arange(len(reader.source)), lambda: threads).wait()
    engine = PipelineRunner(plan, batch_size, compiled.threads.number(reader.input_stats()))
    shuffled = np.random.default_rng(0)

    def submit(rows: Any) -> None:
        inputs, _ = whole.draw(Draws(epoch_key(0, 0), rows, np.zeros_like(rows)), reader.sizes(rows))
        engine.submit(
            reader.read_inputs(rows, reader.find_pil_only(rows), None), {name: inputs[name] for name in plan.inputs}
        )

    def epoch() -> Iterator[Any]:
        rows = shuffled.permutation(len(reader.source))
        for start in range(0, len(rows) - batch_size + 1, batch_size):
            submit(rows[start : start + batch_size])
            if engine.in_flight > _IN_FLIGHT:
                engine.take()
            yield step

    return epoch
