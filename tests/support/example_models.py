# SPDX-License-Identifier: Apache-2.0
"""The example repository (`make serve`), made once per machine: one of its models is trained, which takes seconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from support.model_cache import made_once

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_models.py"


def example_models() -> Path:
    """The repository, to read only."""
    return made_once(write_example_models, sources=tuple(sorted(make_models_script()._source_files())))


def write_example_models(folder: Path) -> None:
    """Make the repository in an empty folder."""
    make_models_script().make(folder)


def make_models_script() -> ModuleType:
    """The script `examples/make_models.py`, as a module."""
    if "make_models" not in sys.modules:
        spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
        if spec is None or spec.loader is None:
            raise ImportError(f"{SCRIPT} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["make_models"] = module
        spec.loader.exec_module(module)
    return sys.modules["make_models"]
