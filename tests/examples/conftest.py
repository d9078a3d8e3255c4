# SPDX-License-Identifier: Apache-2.0
"""The example repository, made once for all its tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from support.example_models import example_models, make_models_script


@pytest.fixture(scope="session")
def make_models() -> ModuleType:
    """The script, as a module."""
    return make_models_script()


@pytest.fixture(scope="session")
def repository() -> Path:
    """What it makes, to read only."""
    return example_models()
