"""With a cache, what goes wrong is said as without, odd files are read as without, and nothing is left behind."""

from __future__ import annotations

from functools import partial

import pytest
import test_faults
import test_formats
import test_recovery
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
from test_recovery import (
    test_loader_frees_its_pipeline_at_once,
    test_no_thread_outlives_an_epoch,
    test_timeout_is_dataloaders_and_the_next_epoch_does_not_hang,
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
    "test_loader_frees_its_pipeline_at_once",
    "test_no_thread_outlives_an_epoch",
    "test_nothing_to_load",
    "test_odd_file_is_read_as_pil_reads_it",
    "test_rotation_in_exif_is_not_followed",
    "test_the_index_is_the_loaders",
    "test_timeout_is_dataloaders_and_the_next_epoch_does_not_hang",
    "test_unequal_shapes_name_two_samples_and_a_transform",
]


@pytest.fixture(autouse=True, params=["host", "device"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the tests of those modules loaders with a cache."""
    for module in (test_faults, test_formats, test_recovery):
        monkeypatch.setattr(module, "DALILoader", partial(DALILoader, cache=request.param))
