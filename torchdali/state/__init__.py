"""Where an epoch is, as plain values: sampler, generators, checkpoints."""

from torchdali.state.checkpoint import merge

__all__ = ["merge"]
