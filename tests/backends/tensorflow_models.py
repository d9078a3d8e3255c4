# SPDX-License-Identifier: Apache-2.0
"""Small TensorFlow models and configurations for the tests of the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.core.dtypes import DTYPES, FP32, DType
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec
from support.late_imports import late

if TYPE_CHECKING:
    from headrace.backends.tensorflow.backend import TensorFlowInstance

TensorFlowBackend = late("headrace.backends.tensorflow.backend", "TensorFlowBackend")
tf = late("headrace.backends.tensorflow.runtime", "tf")
v1 = late("headrace.backends.tensorflow.runtime", "tf.compat.v1")

CPU = Placement("test_0_cpu")
NO_SERVICES = cast("EngineServices", None)
ALL_DTYPES = list(DTYPES.values())

Shape = Sequence[int | None] | None


def tf_type(dtype: str) -> Any:
    """TensorFlow's name for one of our types."""
    others = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BF16": "bfloat16", "BYTES": "string"}
    return getattr(tf, others.get(dtype, dtype.lower()))


def graph(build: Callable[[], Any]) -> bytes:
    """The serialised graph of what `build` makes."""
    with tf.Graph().as_default() as made:
        build()
    return cast("bytes", made.as_graph_def().SerializeToString())


def identity(dtype: str = "FP32", shape: Shape = (None, 4)) -> bytes:
    """X -> Y, unchanged."""
    return graph(lambda: tf.identity(v1.placeholder(tf_type(dtype), shape, name="X"), name="Y"))


def simple() -> bytes:
    """The example of the first inference servers: a sum and a difference."""

    def build() -> None:
        first, second = (v1.placeholder(tf.int32, [None, 16], name=f"INPUT{index}") for index in (0, 1))
        tf.add(first, second, name="OUTPUT0")
        tf.subtract(first, second, name="OUTPUT1")

    return graph(build)


def version_folder(folder: Path) -> ModelFiles:
    """Where version 1 of `test` is, empty."""
    files = ModelFiles(folder / "test", 1, folder / "test" / "1")
    files.version_folder.mkdir(parents=True, exist_ok=True)
    return files


def placed(folder: Path, model: bytes | None, filename: str = "model.graphdef") -> ModelFiles:
    """A frozen graph as version 1 of `test`."""
    files = version_folder(folder)
    if model is not None:
        (files.version_folder / filename).write_bytes(model)
    return files


def saved(folder: Path, function: Callable[..., Any], *shown: Any, module: Any = None, **signatures: Any) -> ModelFiles:
    """A SavedModel of TensorFlow 2 as version 1 of `test`: `function` as serving_default, for tensors as `shown`."""
    files = version_folder(folder)
    concrete = {"serving_default": tf.function(function).get_concrete_function(*shown)}
    concrete |= {name: tf.function(other).get_concrete_function(*shown) for name, other in signatures.items()}
    tf.saved_model.save(module or tf.Module(), str(files.version_folder / "model.savedmodel"), signatures=concrete)
    return files


def saved_v1(folder: Path, build: Callable[[Any], tuple[Any, Any]], **more: Any) -> ModelFiles:
    """A SavedModel as TensorFlow 1 wrote them; `build` is given the session and gives inputs and outputs."""
    files = version_folder(folder)
    with tf.Graph().as_default() as made, v1.Session(graph=made) as session:
        inputs, outputs = build(session)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        infos = [
            {key: v1.saved_model.build_tensor_info(tensor) for key, tensor in tensors.items()}
            for tensors in (inputs, outputs)
        ]
        signature = v1.saved_model.build_signature_def(*infos, "tensorflow/serving/predict")
        builder = v1.saved_model.Builder(str(files.version_folder / "model.savedmodel"))
        settings: dict[str, Any] = {"tags": ["serve"], "name": "serving_default"} | more
        tags, name = settings.pop("tags"), settings.pop("name")
        builder.add_meta_graph_and_variables(session, tags, {name: signature}, **settings)
        builder.save()
    return files


def configured(
    inputs: Mapping[str, tuple[DType, Dims]] | None = None,
    outputs: Mapping[str, tuple[DType, Dims]] | None = None,
    max_batch_size: int = 8,
    **more: Any,
) -> ModelConfig:
    """A configuration for `identity()`; any part can be replaced."""
    inputs = {"X": (FP32, (4,))} if inputs is None else inputs
    outputs = {"Y": (FP32, (4,))} if outputs is None else outputs
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        "tensorflow",
        max_batch_size=max_batch_size,
        inputs=tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items()),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in outputs.items()),
        **more,
    )


def open_instance(config: ModelConfig, files: ModelFiles, placement: Placement = CPU) -> TensorFlowInstance:
    """Load and open."""
    return TensorFlowBackend().load(config, files, NO_SERVICES).open(placement)


def sample(dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values that show a lost bit, sign or letter."""
    count = int(np.prod(shape))
    if dtype.name == "BYTES":
        words = np.array([b"", b"a", b"\xff\xfe", b"nul\0inside", b"x" * 300], dtype=object)
        return np.resize(words, shape)
    if dtype.name == "BOOL":
        return (np.arange(count) % 3 == 0).reshape(shape)
    bits = np.random.default_rng(7).integers(0, 256, count * dtype.item_bytes, dtype=np.uint8)
    return bits.view(dtype.numpy).reshape(shape)
