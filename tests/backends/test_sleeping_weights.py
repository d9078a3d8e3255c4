# SPDX-License-Identifier: Apache-2.0
"""Weights that are moved, dropped and put back: tensors stay the same objects, and those that share memory still do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.backends import sleeping_weights
from headrace.backends.sleeping_weights import FileStamps, SleepingWeights, difference, place_of
from headrace.core.errors import FailedPrecondition

CPU_0 = torch.device("cpu", 0)
"""Another device than `cpu` to PyTorch, so that weights are copied between the two as between a GPU and the host."""


def tensors() -> list[torch.Tensor]:
    whole = torch.arange(24, dtype=torch.float32)
    return [whole, whole[4:12].view(2, 4), whole.view(4, 6).t(), torch.ones(3, dtype=torch.bfloat16)]


def test_weights_are_moved_with_their_sharing() -> None:
    weights = tensors()
    before = [tensor.clone() for tensor in weights]
    addresses = [tensor.data_ptr() for tensor in weights]
    sleeping = SleepingWeights([*weights, weights[0]])
    assert len(sleeping) == 4
    size = sleeping.bytes
    assert size == {"host": 24 * 4 + 3 * 2}
    sleeping_weights._move(sleeping._tensors, [CPU_0] * 4)
    assert all(tensor.data_ptr() != address for tensor, address in zip(weights, addresses, strict=True))
    assert all(torch.equal(tensor, old) for tensor, old in zip(weights, before, strict=True))
    assert [tensor.stride() for tensor in weights] == [old.stride() for old in tensors()]
    assert sleeping.bytes == size
    weights[0][5] = 100
    assert weights[1][0, 1] == weights[2][5, 0] == 100
    sleeping.move_back()
    assert sleeping.bytes == size
    assert weights[1][0, 1] == 100


def test_weights_are_dropped_and_put_back() -> None:
    weights = tensors()
    sleeping = SleepingWeights(weights)
    sleeping.drop()
    assert sleeping.dropped
    assert sleeping.bytes == {}
    with pytest.raises(FailedPrecondition, match="the weights of model 'm' have other shapes than before it slept"):
        sleeping.put_back(tensors()[:3], "model 'm'")
    with pytest.raises(FailedPrecondition, match="other shapes"):
        sleeping.put_back([torch.ones(1), *tensors()[1:]], "model 'm'")
    assert sleeping.dropped
    sleeping.put_back(tensors(), "model 'm'")
    assert not sleeping.dropped
    assert all(torch.equal(tensor, old) for tensor, old in zip(weights, tensors(), strict=True))
    weights[0][5] = 100
    assert weights[1][0, 1] == 100


def test_files_that_changed_are_noticed(tmp_path: Path) -> None:
    file, missing = tmp_path / "weights", tmp_path / "missing"
    file.write_bytes(b"1234")
    stamps = FileStamps([file, missing])
    stamps.check("model 'm'")
    missing.write_bytes(b"1")
    with pytest.raises(FailedPrecondition, match="'missing' of model 'm' has changed since it was loaded"):
        stamps.check("model 'm'")
    missing.unlink()
    file.write_bytes(b"12345")
    with pytest.raises(FailedPrecondition, match="'weights' of model 'm' has changed"):
        stamps.check("model 'm'")


def test_places() -> None:
    assert place_of(torch.device("cpu")) == "host"
    assert place_of(torch.device("cuda", 3)) == "gpu3"
    assert place_of(torch.device("cuda")) == "gpu0"
    assert difference({"gpu0": 10, "host": 5}, {"host": 15}) == {"gpu0": 10}
