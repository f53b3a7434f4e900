"""Tensors on their way to a device: their bytes, and many in one copy."""

import pytest
import torch

from torchdali.samples.transfer import move_packed, to_bytes

NUMBERS = torch.arange(24).view(4, 6)


TENSORS = [
    NUMBERS,
    NUMBERS.T,
    NUMBERS[:1, 2],
    NUMBERS[:0],
    NUMBERS[2, 3],
    NUMBERS.bfloat16()[1:],
    NUMBERS > 3,
    (NUMBERS * 1j).conj(),
    (NUMBERS * 1j).conj().imag,
    (NUMBERS[0, :1] * 1j).to(torch.complex64).conj().imag,
    NUMBERS.float().requires_grad_(),
]


@pytest.mark.parametrize("tensor", TENSORS)
def test_bytes_of_tensors(tensor: torch.Tensor) -> None:
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    copy.view(-1).view(torch.uint8).numpy()[:] = to_bytes(tensor)
    assert torch.equal(copy, tensor)


def test_tensors_that_are_moved_together_keep_their_values_types_and_shapes() -> None:
    """Between them lie tensors of other types, of odd lengths, and of no element."""
    tensors = [NUMBERS[0, :5] > 2, *TENSORS, NUMBERS[1, :3], NUMBERS[2, :1].half(), NUMBERS[3, 2:].float()]
    copies: list[torch.Tensor] = []

    def copy(packed: torch.Tensor) -> torch.Tensor:
        copies.append(packed.clone())
        return copies[-1]

    moved = move_packed(tensors, lambda size: torch.empty(size, dtype=torch.uint8), copy)
    assert len(copies) == 1
    for new, old in zip(moved, tensors, strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new, old.detach())
    moved[-1] += torch.ones(1, requires_grad=True)  # a script may do so, as with a tensor of its own
    assert move_packed([], lambda size: torch.empty(size, dtype=torch.uint8), copy) == []
