"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import random

import pytest

SEED = int(os.environ.get("LORA_COMPILE_TEST_SEED") or random.SystemRandom().randrange(2**31))


def pytest_report_header() -> str:
    return f"seed: {SEED} (repeat with LORA_COMPILE_TEST_SEED={SEED})"


@pytest.fixture
def seed() -> int:
    """Drawn once per run; shown in the header, and repeated with LORA_COMPILE_TEST_SEED."""
    return SEED
