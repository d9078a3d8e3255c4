# SPDX-License-Identifier: Apache-2.0
"""Models of PyTorch: TorchScript and an exported program that batch, one of fixed shapes, bfloat16, and text."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case import Arrays, Case

from headrace.core.dtypes import float32_to_bf16


class _Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return {"y": y, "best": y.argmax(dim=1, keepdim=True)}


class _Distance(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (left - right).abs().sum(dim=1), left @ right.T


class _Words(torch.nn.Module):
    def forward(self, words: list[str]) -> tuple[torch.Tensor, list[str]]:
        return torch.tensor([len(word) for word in words]).unsqueeze(1), [word.upper() for word in words]


class _Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


@cache
def _classifier() -> _Classifier:
    torch.manual_seed(4)
    return _Classifier().eval()


def _write(folder: Path, config: str) -> Path:
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(config)
    return folder / "1"


def _save_script(module: torch.nn.Module, file: Path) -> None:
    with warnings.catch_warnings():
        # TorchScript says that it is deprecated; its files are what people have.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module.eval()), file)


def write_script(folder: Path) -> None:
    config = """platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 16 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "best" data_type: TYPE_INT64 dims: [ 1 ] } ]
dynamic_batching { }
"""
    _save_script(_classifier(), _write(folder, config) / "model.pt")


def script_inputs(rows: int, seed: int) -> Arrays:
    return {"INPUT__0": program_inputs(rows, seed)["x"]}


def script_expected(given: Arrays) -> Arrays:
    return program_expected({"x": given["INPUT__0"]})


def write_program(folder: Path) -> None:
    place = _write(folder, 'backend: "pytorch"\n')
    rows = torch.export.Dim("rows", min=1, max=1024)
    program = torch.export.export(_classifier(), (torch.ones(2, 16),), dynamic_shapes={"x": {0: rows}})
    torch.export.save(program, place / "model.pt2")


def program_inputs(rows: int, seed: int) -> Arrays:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)}


def program_expected(given: Arrays) -> Arrays:
    with torch.inference_mode():
        answer: dict[str, Any] = _classifier()(torch.tensor(given["x"]))
    return {name: tensor.numpy() for name, tensor in answer.items()}


def write_fixed(folder: Path) -> None:
    config = """backend: "pytorch"
default_model_filename: "model.pt2"
input [
  { name: "left" data_type: TYPE_FP64 dims: [ 2, 5 ] },
  { name: "right" data_type: TYPE_FP64 dims: [ 2, 5 ] }
]
output [
  { name: "OUTPUT__0" data_type: TYPE_FP64 dims: [ 2 ] },
  { name: "OUTPUT__1" data_type: TYPE_FP64 dims: [ 2, 2 ] }
]
"""
    given = (torch.ones(2, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64))
    torch.export.save(torch.export.export(_Distance(), given), _write(folder, config) / "model.pt2")


def fixed_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {"left": random.standard_normal((2, 5)), "right": random.standard_normal((2, 5))}


def fixed_expected(given: Arrays) -> Arrays:
    left, right = given["left"], given["right"]
    return {"OUTPUT__0": np.abs(left - right).sum(axis=1), "OUTPUT__1": left @ right.T}


def write_bf16(folder: Path) -> None:
    config = """backend: "pytorch"
max_batch_size: 8
input { name: "x" data_type: TYPE_BF16 dims: [ 6 ] }
output { name: "OUTPUT__0" data_type: TYPE_BF16 dims: [ 6 ] }
"""
    _save_script(_Halves(), _write(folder, config) / "model.pt")


def bf16_inputs(rows: int, seed: int) -> Arrays:
    return {"x": float32_to_bf16(np.random.default_rng(seed).integers(-100, 100, (rows, 6)).astype(np.float32))}


def bf16_expected(given: Arrays) -> Arrays:
    # Halving is one less in the exponent, which is bit 7 of 16; zero stays zero.
    bits = given["x"]
    return {"OUTPUT__0": np.where(bits & 0x7FFF, bits - np.uint16(1 << 7), bits)}


def write_text(folder: Path) -> None:
    config = """backend: "pytorch"
max_batch_size: 8
input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }
output [ { name: "OUTPUT__0" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "OUTPUT__1" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
    _save_script(_Words(), _write(folder, config) / "model.pt")


def text_inputs(rows: int, seed: int) -> Arrays:
    words = np.empty((rows, 1), dtype=object)
    words[:, 0] = [b"word" * (seed % 3 + 1) + b"x" * row for row in range(rows)]
    return {"words": words}


def text_expected(given: Arrays) -> Arrays:
    words = given["words"]
    upper = np.empty(words.shape, dtype=object)
    upper[:, 0] = [word.upper() for word in words[:, 0]]
    return {"OUTPUT__0": np.array([[len(word)] for word in words[:, 0]], np.int64), "OUTPUT__1": upper}


CASES = [
    Case("pytorch_script", write_script, script_inputs, script_expected, "model.pt"),
    Case("pytorch_program", write_program, program_inputs, program_expected, "model.pt2", needs_config=False),
    Case("pytorch_fixed", write_fixed, fixed_inputs, fixed_expected, "model.pt2", batches=False),
    Case("pytorch_bf16", write_bf16, bf16_inputs, bf16_expected, "model.pt"),
    Case("pytorch_text", write_text, text_inputs, text_expected, "model.pt", releases_gil=False),
]
