"""Tensors in one piece of memory."""

import pickle

import pytest
import torch

from torchdali.samples.bundle import Bundle, to_bytes

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


@pytest.mark.parametrize("by_pickle", [False, True])
def test_tensors_of_a_bundle_keep_their_values_types_and_shapes(by_pickle: bool) -> None:
    """Between them lie tensors of other types, of odd lengths, and of no element."""
    tensors = [NUMBERS[0, :5] > 2, *TENSORS, NUMBERS[1, :3], NUMBERS[2, :1].half(), NUMBERS[3, 2:].float()]
    bundle = Bundle.pack(tensors)
    bundle = pickle.loads(pickle.dumps(bundle)) if by_pickle else bundle
    split = bundle.split(bundle.memory.clone())
    for new, old in zip(split, tensors, strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new, old.detach())
    split[-1] += torch.ones(1, requires_grad=True)  # a script may do so, as with a tensor of its own
    assert Bundle.pack([]).split(torch.empty(0, dtype=torch.uint8)) == []


def test_a_tensor_that_comes_twice_is_one_again() -> None:
    bundle = Bundle.pack([NUMBERS, NUMBERS[0], NUMBERS])
    assert bundle.memory.nbytes == NUMBERS.nbytes + NUMBERS[0].nbytes
    for first, row, again in (bundle.split(bundle.memory), bundle.copy_out()):
        assert first is again
        assert torch.equal(first, NUMBERS)
        assert torch.equal(row, NUMBERS[0])


def test_tensors_that_are_copied_out_have_memory_of_their_own() -> None:
    for tensor in Bundle.pack([NUMBERS, NUMBERS[0]]).copy_out():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
