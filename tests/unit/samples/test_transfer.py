"""Bytes of tensors, as they are copied to pinned memory."""

import pytest
import torch

from torchdali.samples.transfer import to_bytes

NUMBERS = torch.arange(24).view(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS,
        NUMBERS.T,
        NUMBERS[:1, 2],
        NUMBERS[:0],
        NUMBERS[2, 3],
        NUMBERS.bfloat16()[1:],
        NUMBERS > 3,
        (NUMBERS * 1j).conj(),
        (NUMBERS * 1j).conj().imag,
        NUMBERS.double().requires_grad_(),
    ],
)
def test_bytes_of_tensors(tensor: torch.Tensor) -> None:
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    copy.view(-1).view(torch.uint8).numpy()[:] = to_bytes(tensor)
    assert torch.equal(copy, tensor)
