"""The operators from which rules build a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchdali.pipeline.host_calls import HostCalls
from torchdali.transforms.spec import Fidelity

__all__ = ["Operators"]


class Operators:
    """The operators from which rules build a graph: see :class:`torchdali.transforms.Ops`.

    Args:
        dali: The module ``nvidia.dali``.
        device: "cpu" or "gpu".
        fidelity: "exact" or "fast".
        threads: Number of threads that call a Python function.

    Attributes:
        host_calls: The Python functions that the graph calls. Close them after the pipeline.
    """

    def __init__(self, dali: Any, device: str, fidelity: Fidelity, threads: int = 1) -> None:
        self.fn: Any = dali.fn
        self.types: Any = dali.types
        self.math: Any = dali.math
        self.device = device
        self.fidelity: Fidelity = fidelity
        self.host_calls: list[HostCalls] = []
        self._threads = threads

    def call(self, function: Callable[..., Any], *nodes: Any, layout: str) -> Any:
        """See :class:`torchdali.transforms.Ops`."""
        calls = HostCalls(function, self._threads)
        self.host_calls.append(calls)
        return self.fn.python_function(*nodes, function=calls, batch_processing=True, output_layouts=layout)

    def apply_where(
        self,
        mask: Any,
        body: Callable[[Any, Mapping[str, Any]], Any],
        image: Any,
        params: Mapping[str, Any],
    ) -> Any:
        """See :class:`torchdali.transforms.Ops`."""
        # DALI compiles an `if` in the source of a pipeline definition to these calls. Rules have no such source.
        split = self.fn._conditional.split  # noqa: SLF001
        chosen, others = split(image, predicate=mask, _if_stmt=True)
        chosen_params = {
            name: split(node, predicate=mask, _if_stmt=True)[0] for name, node in params.items() if node is not mask
        }
        return self.fn._conditional.merge(body(chosen, chosen_params), others, predicate=mask)  # noqa: SLF001
