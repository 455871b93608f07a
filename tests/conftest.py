"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Machines are noisy and the first example of a test may compile its kernels: time decides nothing here.
settings.register_profile("replay", deadline=None)
settings.load_profile("replay")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real traces that stands beside the checkout; tests that need it skip where it is absent."""
    path = ROOT.parent / "shared" / "corpus"
    if not path.is_dir():
        pytest.skip("the corpus of real traces is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def calibration() -> Path:
    """The folder of measurements of real engines that stands beside the checkout."""
    path = ROOT.parent / "shared" / "calibration"
    if not path.is_dir():
        pytest.skip("the calibration measurements are not beside this checkout")
    return path
