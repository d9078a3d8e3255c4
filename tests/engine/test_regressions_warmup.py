# SPDX-License-Identifier: Apache-2.0
"""What a hostile tester found in warm-ups: wrong data was laid to the model's charge."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.core.dtypes import FP32, INT64
from headrace.core.errors import FailedPrecondition
from headrace.engine.execution.warmup import warm_up
from headrace.engine.scheduling.scheduler import Runner
from headrace.models.config.types import InputSpec, Warmup, WarmupInput
from support.engines import config_of


class Unreached:
    """The model is not asked to compute what its configuration rules out."""

    def run(self, batch: object, free: object) -> None:
        raise AssertionError("computed")


def refused(source: WarmupInput, folder: Path) -> str:
    config = config_of("m", inputs=(InputSpec("INPUT0", FP32, (-1, 2)),))
    runner: Runner = Unreached()  # type: ignore[assignment]
    with pytest.raises(FailedPrecondition) as caught:
        asyncio.run(warm_up(runner, config, Warmup("first", 2, {"INPUT0": source}, 1), folder))
    return caught.value.message


@pytest.mark.parametrize(("dtype", "dims"), [(INT64, (1, 2)), (FP32, (1, 3)), (FP32, (2,))])
def test_data_that_the_model_does_not_take(dtype: object, dims: tuple[int, ...], tmp_path: Path) -> None:
    message = refused(WarmupInput(dtype, dims, "zero"), tmp_path)  # type: ignore[arg-type]
    assert "warm-up 'first' gives input 'INPUT0' as" in message
    assert "takes FP32 [-1, 2]" in message


def test_a_file_of_the_wrong_size_is_named_with_its_own_size(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"123")
    message = refused(WarmupInput(FP32, (1, 2), "file", "short"), tmp_path)
    assert str(tmp_path / "warmup" / "short") in message
    assert "Expected 8, got 3" in message
