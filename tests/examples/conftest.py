# SPDX-License-Identifier: Apache-2.0
"""The example repository, made once for all its tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "make_models.py"


@pytest.fixture(scope="session")
def make_models() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_models"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def repository(make_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it makes."""
    made: Path = make_models.make(tmp_path_factory.mktemp("examples") / "models")
    return made
