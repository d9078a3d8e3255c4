# SPDX-License-Identifier: Apache-2.0
"""TorchScript models as the seed has them: four floats to two, in two versions; and those that go wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

WEIGHTS = [[0.1, 0.2, 0.0, 0.0], [0.0, 0.0, 0.1, 0.0]]
"""So that [1, 2, 3, 4] gives the [0.5, 0.3] that the seed shows."""
SCALES = {"v1.0.0": 1.0, "v1.2.0": 10.0}
SECRET = "hunter2-of-the-model"

CONFIG = """
platform: "pytorch_libtorch" max_batch_size: 8
version_policy { all { } }
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ %(size)d ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "version_labels" value { string_value: "1=v1.0.0,2=v1.2.0" } }
instance_group [ { kind: KIND_CPU } ]
"""
CACHED = "response_cache { enable: true }\n"


class Production(torch.nn.Module):
    """The seed's model."""

    def __init__(self, weights: list[list[float]], scale: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(len(weights[0]), 2, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor(weights) * scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)


class Failing(torch.nn.Module):
    """A candidate that should not have been let in."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.numel() > 0:
            raise RuntimeError("hunter2-of-the-model")
        return inputs


def expected(row: list[float], version: str = "v1.0.0") -> list[float]:
    """What `Production` gives."""
    return [SCALES[version] * sum(one * other for one, other in zip(weights, row, strict=True)) for weights in WEIGHTS]


def make_seed_models(folder: Path) -> Path:
    """Folders for `model.path` (`versions`), for a server (`repository`), and for many requests at once (`joined`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for number, (version, scale) in enumerate(SCALES.items(), 1):
            model = torch.jit.script(Production(WEIGHTS, scale).eval())
            _save(model, folder / "versions/production" / version)
            _save(model, folder / "repository/production" / str(number))
            _save(model, folder / "joined/production" / str(number))
        _save(torch.jit.script(Production([[0.5, 0.0], [0.0, 0.5]], 1.0).eval()), folder / "repository/pair/1")
        _save(torch.jit.script(Production(WEIGHTS, 1.0).eval()), folder / "repository/candidate/1")
        _save(torch.jit.script(Failing().eval()), folder / "repository/candidate/2")
        _save(torch.jit.script(Production(WEIGHTS, 1.0).eval()), folder / "repository/misfit/1")
        _save(torch.jit.script(Production([[1.0] * 5] * 2, 1.0).eval()), folder / "repository/misfit/2")
    for name, size, more in (("production", 4, ""), ("candidate", 4, ""), ("misfit", 4, ""), ("pair", 2, CACHED)):
        (folder / "repository" / name / "config.pbtxt").write_text(CONFIG % {"size": size} + more)
    joined = CONFIG.replace("max_batch_size: 8", "max_batch_size: 64") + "dynamic_batching { }\n"
    (folder / "joined/production/config.pbtxt").write_text(joined % {"size": 4})
    return folder


def _save(model: torch.jit.ScriptModule, folder: Path) -> None:
    folder.mkdir(parents=True)
    model.save(str(folder / "model.pt"))
