"""Damaged headers take no memory and no process with them, and each fault is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import TESTS
from helpers.header_fuzz import mutate, write_formats
from helpers.started import run_python


@pytest.mark.timeout(120)
def test_mutated_headers(tmp_path: Path) -> None:
    """Of all formats, read by image folders, a cache and worker-fed datasets, with each ``on_error``.

    By hand, for longer: ``python tests/helpers/header_fuzz.py FOLDER SEED SECONDS``. A file that was wrong stays there.
    """
    done = run_python(TESTS / "helpers" / "header_fuzz.py", tmp_path, 0, 100, 2, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "'rounds': 2" in done.stdout


def test_mutations_follow_from_the_seed_and_change_the_file() -> None:
    formats = write_formats()
    assert len(formats) == len(set(formats.values())) > 20
    for data in formats.values():
        first, again = (mutate(data, np.random.default_rng(3)) for _ in range(2))
        assert first == again
        assert first != data
