# SPDX-License-Identifier: Apache-2.0
"""Counting GPUs from the names in /dev, here a folder that looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.backends.devices import visible_gpus


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,-1,1", 1), ("GPU-8932f937, GPU-1", 2), ("0,1,2,3,4", 3)],
)
def test_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus(tmp_path) == expected


def test_a_machine_without_devices_has_none(tmp_path: Path) -> None:
    assert visible_gpus(tmp_path / "nothing") == 0
