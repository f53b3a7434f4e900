"""With a cache, what is wrong with a file is said as without, and odd files are read as without."""

from __future__ import annotations

from functools import partial

import pytest
import test_faults
import test_formats
from test_faults import (
    test_batches_of_any_size,
    test_crop_larger_than_a_picture_names_both,
    test_damaged_file_is_named_in_its_turn,
    test_each_of_several_bad_files_is_named,
    test_empty_batch_is_what_collate_makes_of_it,
    test_errors_of_the_sampler_come_after_the_batches_before,
    test_errors_of_users_code_are_theirs,
    test_nothing_to_load,
    test_the_index_is_the_loaders,
    test_unequal_shapes_name_two_samples_and_a_transform,
)
from test_formats import (
    photograph,
    test_file_that_is_rewritten_between_epochs_is_read_anew,
    test_odd_file_is_read_as_pil_reads_it,
    test_rotation_in_exif_is_not_followed,
)

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(30)

__all__ = [
    "photograph",
    "test_batches_of_any_size",
    "test_crop_larger_than_a_picture_names_both",
    "test_damaged_file_is_named_in_its_turn",
    "test_each_of_several_bad_files_is_named",
    "test_empty_batch_is_what_collate_makes_of_it",
    "test_errors_of_the_sampler_come_after_the_batches_before",
    "test_errors_of_users_code_are_theirs",
    "test_file_that_is_rewritten_between_epochs_is_read_anew",
    "test_nothing_to_load",
    "test_odd_file_is_read_as_pil_reads_it",
    "test_rotation_in_exif_is_not_followed",
    "test_the_index_is_the_loaders",
    "test_unequal_shapes_name_two_samples_and_a_transform",
]


@pytest.fixture(autouse=True, params=["host", "device"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the tests of those modules loaders with a cache."""
    for module in (test_faults, test_formats):
        monkeypatch.setattr(module, "DALILoader", partial(DALILoader, cache=request.param))
