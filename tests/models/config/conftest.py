# SPDX-License-Identifier: Apache-2.0
"""Folders of models for these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.models.config.completion import complete
from headrace.models.config.drafts import read_draft
from headrace.models.config.problems import ConfigError

TENSORS = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make the folder of a model: what its configuration says, its name, the configuration's file, other files."""

    def make(text: str | bytes, name: str = "m", file: str = "config.pbtxt", others: tuple[str, ...] = ()) -> Path:
        created = tmp_path / name
        created.mkdir(exist_ok=True)
        (created / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        for other in others:
            (created / other).parent.mkdir(parents=True, exist_ok=True)
            (created / other).touch()
        return created

    return make


@pytest.fixture
def problems(folder: Callable[..., Path]) -> Callable[..., list[str]]:
    """What is wrong with a configuration, without the path."""

    def find(text: str | bytes, *, gpus: int = 0, **where: object) -> list[str]:
        try:
            complete(read_draft(folder(text, **where)), None, gpus)
        except ConfigError as error:
            return [str(problem).partition("/config.")[2] for problem in error.problems]
        return []

    return find


@pytest.fixture
def tensors() -> str:
    return TENSORS
