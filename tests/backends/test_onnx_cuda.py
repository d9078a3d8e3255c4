# SPDX-License-Identifier: Apache-2.0
"""ONNX models on a GPU, where there are one and onnxruntime-gpu; without, only what an instance does there on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx_graphs import ALL_DTYPES, configured, graph, identity, open_instance, placed, sample

from headrace.backends.contract import DeviceComputeInstance, Placement
from headrace.backends.onnx import backend as onnx_backend
from headrace.backends.onnx.backend import OnnxCudaInstance
from headrace.backends.onnx.session import can_use_gpus, signature_of
from headrace.core.dtypes import BF16, BYTES, FP32, DType
from headrace.core.errors import InvalidArgument

GPU = Placement("test_0_gpu0", "gpu", 0)
on_a_gpu = pytest.mark.skipif(not can_use_gpus(), reason="no GPU, or no onnxruntime-gpu")


def host_session_as_if_on_a_gpu(dtype: DType) -> OnnxCudaInstance:
    session = ort.InferenceSession(identity(dtype.name), providers=["CPUExecutionProvider"])
    return OnnxCudaInstance(configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))}), session, signature_of(session), 0)


@pytest.mark.parametrize("dtype", [FP32, BF16, BYTES], ids=lambda dtype: dtype.name)
def test_without_pytorch_for_cuda_outputs_of_an_ensemble_step_are_on_the_host(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_backend, "_torch_uses_cuda", lambda: False)
    instance = host_session_as_if_on_a_gpu(dtype)
    assert isinstance(instance, DeviceComputeInstance)
    given = sample(dtype, (2, 4))
    answer = instance.compute_on_device({"X": given}, ["Y"])["Y"]
    assert isinstance(answer, np.ndarray)
    assert answer.tolist() == given.tolist()


@on_a_gpu
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_every_data_type_passes_through_the_gpu_unchanged(tmp_path: Path, dtype: DType) -> None:
    config = configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))})
    instance = open_instance(config, placed(tmp_path, identity(dtype.name)), GPU)
    for rows in (1, 3, 0):
        given = sample(dtype, (rows, 4))
        kept: Any = instance.compute_on_device({"X": given}, ["Y"])["Y"]
        assert tuple(kept.shape) == given.shape
        assert isinstance(kept, np.ndarray) == (dtype is BYTES)
        for answer in (instance.compute({"X": given}, ["Y"])["Y"], np.asarray(kept)):
            assert answer.dtype == dtype.numpy
            assert answer.tolist() == given.tolist()
        again: Any = instance.compute({"X": kept}, ["Y"])["Y"]
        assert again.tolist() == given.tolist()
    instance.close()


@on_a_gpu
def test_outputs_in_gpu_memory_are_cut_joined_and_outlive_the_session(tmp_path: Path) -> None:
    row = (TensorProto.FLOAT, ["n", 4])
    files = placed(tmp_path, graph([helper.make_node("Neg", ["X"], ["Y"])], {"X": row}, {"Y": row}))
    instance: Any = open_instance(configured({"X": (FP32, (4,))}, {"Y": (FP32, (4,))}), files, GPU)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    kept = instance.compute_on_device({"X": rows}, ["Y"])["Y"]
    other = instance.compute_on_device({"X": rows * 2}, ["Y"])["Y"]
    joined: Any = np.concatenate([kept[1:2], other, rows])
    assert not isinstance(joined, np.ndarray), "joined on the device"
    expected = np.concatenate([-rows[1:2], -2 * rows, rows])
    assert np.asarray(joined).tolist() == expected.tolist()
    assert instance.compute({"X": joined}, ["Y"])["Y"].tolist() == (-expected).tolist()
    turned: Any = kept.reshape((4, 3))
    assert np.asarray(turned).tolist() == (-rows).reshape(4, 3).tolist()
    instance.close()
    assert np.asarray(kept).tolist() == (-rows).tolist()


@on_a_gpu
def test_an_input_that_does_not_fit_is_the_clients_error_and_the_next_is_answered(tmp_path: Path) -> None:
    row = (TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Add", ["X", "Z"], ["Y"])]
    files = placed(tmp_path, graph(nodes, {"X": row, "Z": row}, {"Y": row}))
    instance = open_instance(configured({"X": (FP32, (4,)), "Z": (FP32, (4,))}), files, GPU)
    rows = np.ones((3, 4), np.float32)
    with pytest.raises(InvalidArgument, match="does not accept"):
        instance.compute({"X": rows, "Z": np.ones((3, 5), np.float32)}, ["Y"])
    assert instance.compute({"X": rows, "Z": rows}, ["Y"])["Y"].tolist() == [[2.0] * 4] * 3
    instance.close()
