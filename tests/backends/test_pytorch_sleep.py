# SPDX-License-Identifier: Apache-2.0
"""PyTorch models that sleep: their weights are dropped and read again, and their answers are the same."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from pytorch_models import CPU, NO_SERVICES, Scaled, batched_program, configured, exported, placed, script, traced

from headrace.backends.contract import SleepableModel
from headrace.backends.pytorch.backend import PyTorchBackend, TorchModel
from headrace.core.errors import FailedPrecondition

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Tied(torch.nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.relu(self.first(x))) + self.shift)[:, :3]


class Counting(torch.nn.Module):
    """Keeps a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[:, :3] + self.calls


class Wide(torch.nn.Module):
    """Weights of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4096)
        self.wide = torch.nn.Linear(4096, 4096)
        self.last = torch.nn.Linear(4096, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.first(x)))


def opened(folder: Path, model: bytes, **parameters: str) -> TorchModel:
    return PyTorchBackend().load(configured(parameters=parameters), placed(folder, model), NO_SERVICES)


def stored(model: TorchModel) -> int:
    """Bytes of the storages of its tensors."""
    tensors = [tensor for _, weights in model._weights if weights is not None for tensor in weights._tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


KINDS: dict[str, Callable[[], bytes]] = {
    "script": lambda: script(Scaled()),
    "traced": lambda: traced(Scaled(), torch.ones(2, 4)),
    "program": batched_program,
    "tied script": lambda: script(Tied()),
    "tied program": lambda: exported(Tied(), [torch.ones(2, 4)], {"x": {0: torch.export.Dim("rows")}}),
}


@pytest.mark.parametrize("parameters", [{}, {"precision": "bf16"}, {"ENABLE_WEIGHT_SHARING": "false"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_after_each_level(tmp_path: Path, kind: str, parameters: dict[str, str]) -> None:
    torch.manual_seed(5)
    model = opened(tmp_path, KINDS[kind](), **parameters)
    assert isinstance(model, SleepableModel)
    instances = [model.open(CPU), model.open(CPU)]
    before = [instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() for instance in instances]
    size = stored(model)
    assert size
    calls = [instance._call for instance in instances]
    for level in (1, 2, 2, 1):
        freed = model.sleep(level)  # type: ignore[arg-type]
        # The weights of a CPU are in host memory anyway.
        assert freed == ({} if level == 1 else {"host": size})
        assert stored(model) == (size if level == 1 else 0)
        model.wake()
        assert stored(model) == size
        assert [instance._call for instance in instances] == calls  # what PyTorch has compiled is kept
        assert [i.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() for i in instances] == before
    model.sleep(2)
    for instance in instances:
        instance.close()
    model.close()


def test_memory_is_given_back_at_level_2(tmp_path: Path) -> None:
    model = opened(tmp_path, script(Wide()))
    instance = model.open(CPU)
    before = instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist()

    def resident() -> int:
        gc.collect()
        return int(psutil.Process(os.getpid()).memory_info().rss)

    awake, size = resident(), stored(model)
    assert size > 64 << 20
    assert model.sleep(2) == {"host": size}
    assert awake - resident() > 0.8 * size
    model.wake()
    assert instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == before
    assert resident() < awake + 0.3 * size
    instance.close()
    model.close()


def test_a_model_with_state_of_its_own_does_not_lose_it(tmp_path: Path) -> None:
    model = opened(tmp_path, script(Counting()))
    instance = model.open(CPU)
    assert instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"][0, 0] == 1
    with pytest.raises(FailedPrecondition, match="keeps state between its requests, which level 2 would lose"):
        model.sleep(2)
    assert model.sleep(1) == {}
    model.wake()
    assert instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"][0, 0] == 2
    instance.close()
    model.close()


def test_a_changed_file_is_not_taken_for_the_model(tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = script(Scaled())
    model = opened(tmp_path, first)
    instance = model.open(CPU)
    before = instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist()
    file = tmp_path / "test" / "1" / "model.pt"
    model.sleep(2)
    file.rename(tmp_path / "kept")
    with pytest.raises(FailedPrecondition, match=r"'model\.pt' of model 'test' has changed since it was loaded"):
        model.wake()
    file.write_bytes(script(Scaled()))
    with pytest.raises(FailedPrecondition, match="has changed"):
        model.wake()
    (tmp_path / "kept").rename(file)
    model.wake()
    assert instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == before
    instance.close()
    model.close()


def test_a_batch_that_is_computed_ends_first(tmp_path: Path) -> None:
    """Its request may have been cancelled, so that the engine does not know of it."""
    model = opened(tmp_path, script(Scaled()))
    instance = model.open(CPU)
    size = stored(model)
    with instance.computing:
        sleeping = threading.Thread(target=model.sleep, args=(2,))
        sleeping.start()
        sleeping.join(0.2)
        assert sleeping.is_alive()
        assert stored(model) == size
    sleeping.join(30)
    assert stored(model) == 0
    model.wake()
    instance.close()
    model.close()
