# SPDX-License-Identifier: Apache-2.0
"""Caffe2 nets for tests, written as Caffe2's own exporters write them.

net = Nets()
net.weight("w", array)
net.op("Conv", ["data", "w"], ["y"], kernel=3)
answer = net.run({"data": image}, ["y"])["y"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.netdef.backend import NetDefBackend
from headrace.backends.netdef.files import Pair, caffe2_message, parse_net
from headrace.backends.netdef.translation import InputTensor, translate
from headrace.backends.onnx.backend import OnnxInstance
from headrace.core.dtypes import FP32, DType, dtype_of
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec

Array = np.ndarray[Any, Any]

_FILLS = {
    "float32": ("GivenTensorFill", "floats"),
    "float64": ("GivenTensorDoubleFill", "floats"),
    "int32": ("GivenTensorIntFill", "ints"),
    "int64": ("GivenTensorInt64Fill", "ints"),
    "int16": ("GivenTensorInt16Fill", "ints"),
    "bool": ("GivenTensorBoolFill", "ints"),
    "object": ("GivenTensorStringFill", "strings"),
}


def argument(message: Any, name: str, value: Any) -> None:
    """Add an argument of the kind that the value is."""
    created = message.arg.add(name=name)
    if isinstance(value, str | bytes):
        created.s = value.encode() if isinstance(value, str) else value
    elif isinstance(value, bool | int):
        created.i = int(value)
    elif isinstance(value, float):
        created.f = value
    elif value and isinstance(value[0], float):
        created.floats.extend(value)
    elif value and isinstance(value[0], bytes):
        created.strings.extend(value)
    else:
        created.ints.extend(value)


class Nets:
    """A model while it is made: the net that computes and the one that has the weights."""

    def __init__(self, *inputs: str) -> None:
        self.init = caffe2_message("NetDef")(name="init")
        self.net = caffe2_message("NetDef")(name="net")
        self.net.external_input.extend(inputs or ["data"])

    def op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: Any) -> Any:
        created = self.net.op.add(type=kind, input=inputs, output=outputs)
        for name, value in arguments.items():
            argument(created, name, value)
        return created

    def fill(self, kind: str, blob: str, **arguments: Any) -> Any:
        created = self.init.op.add(type=kind, output=[blob])
        for name, value in arguments.items():
            argument(created, name, value)
        if blob not in self.net.external_input:
            self.net.external_input.append(blob)
        return created

    def weight(self, blob: str, array: Any) -> str:
        array = np.asarray(array)
        kind, field = _FILLS[array.dtype.name]
        created = self.fill(kind, blob, shape=list(array.shape))
        values = array.astype(np.int64) if field == "ints" else array
        getattr(created.arg.add(name="values"), field).extend(values.ravel().tolist())
        return blob

    def pair(self, outputs: Sequence[str] = ()) -> Pair:
        self.net.external_output[:] = outputs or self.net.external_output
        if not self.init.op:
            self.fill("ConstantFill", "nothing", shape=[1])
        return Pair(
            parse_net(self.init.SerializeToString(), "init_model.netdef"),
            parse_net(self.net.SerializeToString(), "model.netdef"),
        )

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Translate for any batch, and compute."""
        tensors = [InputTensor(name, dtype_of(array), open_batch(array)) for name, array in inputs.items()]
        model = translate(self.pair(outputs), tensors, outputs)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        answers = session.run(list(outputs), dict(inputs))
        for told, answer in zip(session.get_outputs(), answers, strict=True):
            known = [size for size in told.shape if isinstance(size, int)]
            assert len(told.shape) == answer.ndim, (told.name, told.shape, answer.shape)
            assert all(size in answer.shape for size in known)
        return dict(zip(outputs, answers, strict=True))

    def write(self, folder: Path, filename: str = "model.netdef") -> None:
        if not self.init.op:
            self.fill("ConstantFill", "nothing", shape=[1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / filename).write_bytes(self.net.SerializeToString())
        (folder / f"init_{filename}").write_bytes(self.init.SerializeToString())


def open_batch(array: Array) -> tuple[int, ...]:
    return (-1, *array.shape[1:]) if array.ndim else ()


def computed(kind: str, *given: Array, weights: Sequence[Array] = (), outputs: int = 1, **arguments: Any) -> Any:
    """What one operator makes of arrays, the `weights` from the init net. A list if there are several outputs."""
    names = [f"x{number}" for number in range(len(given))]
    net = Nets(*names)
    loaded = [net.weight(f"w{number}", array) for number, array in enumerate(weights)]
    created = [f"y{number}" for number in range(outputs)]
    net.op(kind, [*names, *loaded], created, **arguments)
    answers = net.run(dict(zip(names, given, strict=True)), created)
    return answers["y0"] if outputs == 1 else [answers[name] for name in created]


def rows(*shape: int, seed: int = 1, dtype: Any = np.float32) -> Array:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder / "test", 1, folder / "test" / "1")


def config_of(
    inputs: Mapping[str, tuple[DType, Dims]] | None = None,
    outputs: Mapping[str, tuple[DType, Dims]] | None = None,
    max_batch_size: int = 8,
    **more: Any,
) -> ModelConfig:
    inputs = {"data": (FP32, (4,))} if inputs is None else inputs
    outputs = {"y": (FP32, (4,))} if outputs is None else outputs
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        "netdef",
        max_batch_size=max_batch_size,
        inputs=tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items()),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in outputs.items()),
        **more,
    )


def open_instance(config: ModelConfig, folder: Path) -> OnnxInstance:
    return NetDefBackend().load(config, files_of(folder), None).open(Placement("test_0_cpu"))  # type: ignore[arg-type]
