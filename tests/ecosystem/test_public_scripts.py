"""What public training scripts do with a DataLoader besides iterating over it works with a DALILoader."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate
from torchvision.datasets import DatasetFolder, ImageFolder, folder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import graph
from torchdali.runtime import devices

pytestmark = pytest.mark.timeout(60)

SMALL = v2.Compose([v2.CenterCrop(24), v2.ToImage()])


class Asked(Dataset):
    """A dataset of pictures that torchdali must ask for samples."""

    def __init__(self, root, transform=None):
        self.folder = ImageFolder(root, transform)

    def __len__(self):
        return len(self.folder)

    def __getitem__(self, index):
        return self.folder[index]


class Recorded(RandomSampler):
    """Keeps the order that it gave."""

    def __iter__(self):
        self.order = list(super().__iter__())
        return iter(self.order)


def drawing(samples):
    """A ``collate_fn`` that draws from each global generator, as MixUp and maskers do."""
    images, labels = default_collate(samples)
    drawn = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)  # noqa: NPY002
    return images, labels, drawn


def start(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def now():
    return torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


def orders(make, **options):
    """Return the sampler's orders of two epochs, and a draw from each generator after them."""
    start(0)
    dataset, more = make()
    sampler = Recorded(dataset)
    loader = options.pop("loader")(dataset, batch_size=4, sampler=sampler, num_workers=2, collate_fn=drawing, **more)
    found = []
    for _ in range(2):
        assert sum(len(batch[1]) for batch in loader) == len(dataset)
        found.append(sampler.order)
    return found, now()


@pytest.mark.parametrize("asked", [False, True], ids=["read", "asked"])
def test_a_collate_fn_that_draws_leaves_the_generators_alone(asked, pictures, device):
    """As in DataLoader with worker processes, so the next epoch's order does not depend on it."""
    theirs = orders(lambda: (ImageFolder(pictures, SMALL), {}), loader=DataLoader)
    ours = orders(
        (lambda: (Asked(pictures), {"transform": SMALL, "device": device}))
        if asked
        else (lambda: (ImageFolder(pictures, SMALL), {"device": device})),
        loader=DALILoader,
    )
    assert ours == theirs


def drawn(loader, epochs=2):
    return [batch[2].tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("asked", [False, True], ids=["read", "asked"])
def test_draws_of_a_collate_fn_follow_from_the_seed_and_resume(asked, pictures, device):
    def make(**options):
        dataset = Asked(pictures) if asked else ImageFolder(pictures)
        generator = torch.Generator().manual_seed(3)
        return DALILoader(
            dataset,
            batch_size=4,
            shuffle=True,
            transform=SMALL,
            collate_fn=drawing,
            device=device,
            generator=generator,
            **options,
        )

    start(1)
    whole = drawn(make(seed=5))
    start(2)
    assert drawn(make(seed=5)) == whole
    assert len({tuple(numbers) for numbers in whole}) == len(whole)
    loader = make(seed=5)
    batches = iter(loader)
    shown = [next(batches)[2].tolist() for _ in range(2)]
    state = loader.state_dict()
    start(3)
    again = make(seed=5)
    again.load_state_dict(state)
    assert shown + drawn(again) == whole


def jittered(image):
    """A transform of the user's own that draws from each generator."""
    return image + torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002


def in_threads(pictures, chain, device):
    """Return the means of images of two loaders with the same seed, each in its own thread."""
    found = {}

    def iterate(number):
        generator = torch.Generator()
        loader = DALILoader(ImageFolder(pictures, chain), batch_size=3, seed=1, generator=generator, device=device)
        found[number] = [images.mean().item() for images, _ in loader]

    threads = [threading.Thread(target=iterate, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_loaders_in_two_threads_leave_the_generators_as_they_were(pictures, device):
    chain = v2.Compose([*SMALL.transforms, v2.Lambda(jittered)])
    start(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    means = in_threads(pictures, chain, device)
    assert means[0] == means[1]
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize(("name", "early"), [("transform", True), ("device", True), ("seed", False)])
def test_a_subclass_with_an_attribute_of_that_name_is_refused(name, early, dataset):
    """Else its transform would run twice, or its device would become "auto"."""

    class Kept(DALILoader):
        def __init__(self, dataset, value, **options):
            if early:
                setattr(self, name, value)
            super().__init__(dataset, **options)
            if not early:
                setattr(self, name, value)

    with pytest.raises(ValueError, match=name):
        Kept(dataset, SMALL, batch_size=3)


def test_a_subclass_may_have_attributes_of_other_names(dataset):
    class Named(DALILoader):
        def __init__(self, dataset, **options):
            self.crop = SMALL
            super().__init__(dataset, **options)
            self.size = 24

    loader = Named(dataset, batch_size=3, device="cpu")
    assert sum(len(labels) for _, labels in loader) == len(dataset)
    assert (loader.crop, loader.size) == (SMALL, 24)


def test_a_loader_can_be_copied_by_its_public_attributes(dataset):
    """As pytorch-ignite does for its deterministic engine."""
    loader = DALILoader(dataset, batch_size=3, num_workers=1, device="cpu")
    leave = ("batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind")
    names = [name for name in vars(loader) if not name.startswith("_") and name not in leave]
    again = type(loader)(batch_sampler=loader.batch_sampler, **{name: getattr(loader, name) for name in names})
    assert [labels.tolist() for _, labels in again] == [labels.tolist() for _, labels in loader]


def test_an_iterator_can_be_shut_down(dataset):
    batches = iter(DALILoader(dataset, batch_size=3, device="cpu"))
    next(batches)
    batches._shutdown_workers()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


@pytest.mark.parametrize(("owner", "name"), [(folder, "pil_loader"), (DatasetFolder, "__getitem__")])
def test_functions_of_torchvision_that_a_script_replaced_are_called(owner, name, pictures, monkeypatch):
    original = getattr(owner, name)
    called = []
    monkeypatch.setattr(owner, name, lambda *given: (called.append(given), original(*given))[1])
    loader = DALILoader(ImageFolder(pictures), batch_size=4, transform=SMALL, device="cpu")
    assert sum(len(labels) for _, labels in loader) == len(called) == len(loader.dataset)


def test_auto_is_the_cpu_in_a_worker_of_another_loader(monkeypatch):
    """CUDA cannot be used after a fork."""
    monkeypatch.setattr(graph, "explain_unavailability", lambda device: None)
    monkeypatch.setattr(devices, "find_own", lambda: torch.device("cuda", 0))
    assert graph.resolve("auto") == torch.device("cuda", 0)
    monkeypatch.setattr(graph, "get_worker_info", lambda: SimpleNamespace(id=0))
    assert graph.resolve("auto") == torch.device("cpu")


class Negated:
    """Wraps an iterator."""

    def __init__(self, iterator):
        self.iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        images, labels = next(self.iterator)
        return -images.float(), labels


class Hooked(DALILoader):
    """Returns a wrapped iterator."""

    def _get_iterator(self):
        return Negated(super()._get_iterator())


@pytest.mark.parametrize(("asked", "workers"), [(False, 0), (True, 1)])
def test_a_subclass_may_wrap_the_iterator(asked, workers, pictures, device):
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, "transform": SMALL, "device": device}
    dataset = Asked(pictures) if asked else ImageFolder(pictures)
    plain, hooked = (
        kind(dataset, generator=torch.Generator().manual_seed(2), **options) for kind in (DALILoader, Hooked)
    )
    for _ in range(2):
        for (images, labels), (negated, same_labels) in zip(plain, hooked, strict=True):
            assert torch.equal(negated, -images.float())
            assert torch.equal(labels, same_labels)


def test_order_of_an_iterator_that_a_script_makes_is_dataloaders(pictures):
    """As Ultralytics' loader does after a change of its dataset."""
    dataset = ImageFolder(pictures, SMALL)
    dataset.samples = [(path, number) for number, (path, _) in enumerate(dataset.samples)]
    loaders = [kind(dataset, batch_size=4, shuffle=True, num_workers=2) for kind in (DataLoader, DALILoader)]
    orders = []
    for loader in loaders:
        start(4)
        orders.append([labels.tolist() for _ in range(2) for _, labels in loader._get_iterator()])
    assert orders[0] == orders[1]
