# SPDX-License-Identifier: Apache-2.0
"""A config.json that claims more than the weights beside it is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.weight_files import WeightFiles, check_memory, check_sizes, read_weight_files
from headrace.core.errors import FailedPrecondition, ResourceExhausted

SHAPES = {"embed": [512, 64], "layer.0": [64, 64], "layer.1": [64, 64]}
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2**30,
    "rope_theta": 10**9,
}


def put_weights(folder: Path, shapes: dict[str, Any], name: str = "model.safetensors") -> None:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}} | {key: {"dtype": "F32", "shape": shape} for key, shape in shapes.items()}
    ).encode()
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)


def test_the_headers_of_all_files_are_counted(tmp_path: Path) -> None:
    put_weights(tmp_path, {"a": [2, 3], "scalar": []}, "model-00001.safetensors")
    put_weights(tmp_path, {"b": [5]}, "model-00002.safetensors")
    result = read_weight_files(tmp_path)
    assert (result.tensors, result.elements) == (3, 12)
    assert result.stored_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "claims",
    [
        {"vocab_size": 2**40},
        {"num_hidden_layers": 1_000_000},
        {"hidden_size": 2**24},
        {"num_attention_heads": 2**30},
        {"num_labels": 2**31},
        {"text_config": {"vocab_size": 2**40}},
        {"vision_config": {"depths": [2, 2, 10**7]}},
        {"num_local_experts": 10**6},
        {"vocab_size": 2**23, "hidden_size": 2**16},
    ],
)
def test_absurd_sizes_are_refused(tmp_path: Path, claims: dict[str, Any]) -> None:
    put_weights(tmp_path, SHAPES)
    with pytest.raises(FailedPrecondition, match=r"config.json' says .*3 tensors with 40960 numbers"):
        check_sizes(tmp_path, LLAMA | claims)


def test_true_configurations_pass(tmp_path: Path) -> None:
    put_weights(tmp_path, SHAPES)
    assert check_sizes(tmp_path, LLAMA) == read_weight_files(tmp_path)
    # Many layers may share tensors, quantised weights are packed, and pictures may be larger than any tensor.
    check_sizes(tmp_path, LLAMA | {"num_hidden_layers": 24, "vocab_size": 4096, "image_size": 10**6, "use_cache": True})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (4).to_bytes(8, "little") + b"[1,]",
        (2).to_bytes(8, "little") + b"[]",
        (15).to_bytes(8, "little") + b'{"a":{"shape":1',
        (18).to_bytes(8, "little") + b'{"a":{"shape":1}}  ',
        (20).to_bytes(8, "little") + b'{"a":{"shape":[-1]}}',
        (9).to_bytes(8, "little") + b'{"a": {}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FailedPrecondition, match=r"model.safetensors' is not a complete safetensors file"):
        read_weight_files(tmp_path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.weight_files.available_memory", lambda: 10**9)
    halves = WeightFiles(100, 400_000_000, 800_000_000)
    check_memory(tmp_path, halves, 2, None)
    with pytest.raises(ResourceExhausted, match=r"take 1.6 GB of memory, and 1 GB are free: load it in 16 bits"):
        check_memory(tmp_path, halves, 4, None)
    check_memory(tmp_path, halves, 4, 2 * 10**9)
    with pytest.raises(ResourceExhausted, match="0.5 GB are allowed"):
        check_memory(tmp_path, halves, 2, 5 * 10**8)
