# SPDX-License-Identifier: Apache-2.0
"""The seed's `resnet50`: a real ResNet-50 with random weights, frozen and as a SavedModel, served with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from contract_serving import Served

from headrace.backends.tensorflow.runtime import tf

v1 = tf.compat.v1

pytestmark = [pytest.mark.slow, pytest.mark.worker("frameworks"), pytest.mark.timeout(300)]
"""TensorFlow takes a while to make, save and freeze it. Small models of both formats: `test_backend_contract`."""

# As the seed has it, with labels, on CPUs, and without a name, which is its folder's.
CONFIG = """platform: "tensorflow_{format}"
max_batch_size: 128
input [
  {{
    name: "input"
    data_type: TYPE_FP32
    format: FORMAT_NHWC
    dims: [ 224, 224, 3 ]
  }}
]
output [
  {{
    name: "output"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    label_filename: "resnet50_labels.txt"
  }}
]
instance_group [
  {{
    count: 2
    kind: KIND_CPU
  }}
]
parameters: {{ key: "MAX_SESSION_SHARE_COUNT" value: {{ string_value: "2" }} }}
"""
NAMES = {"resnet50": "graphdef", "resnet50_savedmodel": "savedmodel"}
IMAGES = np.random.default_rng(3).random((2, 224, 224, 3), np.float32)
LABELS = [f"label {index}" for index in range(1000)]


def resnet50(images: Any, weight: Callable[..., Any]) -> Any:
    """The network, of what `weight` gives for each shape."""

    def convolved(x: Any, size: int, channels: int, stride: int = 1) -> Any:
        x = tf.nn.conv2d(x, weight(size, size, x.shape[-1], channels), stride, "SAME")
        scale, offset, mean, variance = (weight(channels) for _ in range(4))
        return v1.nn.fused_batch_norm(x, scale, offset, mean, variance, is_training=False)[0]

    x = tf.nn.relu(convolved(images, 7, 64, 2))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            shortcut = convolved(x, 1, 4 * width, stride) if block == 0 else x
            y = tf.nn.relu(convolved(x, 1, width))
            y = tf.nn.relu(convolved(y, 3, width, stride))
            x = tf.nn.relu(convolved(y, 1, 4 * width) + shortcut)
    return tf.nn.softmax(tf.reduce_mean(x, [1, 2]) @ weight(2048, 1000) + weight(1000))


class Weights:
    """Random ones."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._random = np.random.default_rng(5)

    def new(self, *shape: int) -> Any:
        """Such that numbers keep their size from layer to layer."""
        spread = np.sqrt(2 / np.prod(shape[:-1])) if len(shape) > 1 else 0.1
        array = self._random.standard_normal(shape, np.float32) * np.float32(spread) + (len(shape) == 1)
        self.arrays.append(array.astype(np.float32))
        return self.arrays[-1]


def one_by_one(given: Sequence[Any]) -> Callable[..., Any]:
    """The weights once more, in their order."""
    item = iter(given)
    return lambda *shape: next(item)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    repository = tmp_path_factory.mktemp("resnet50")
    for name, kind in NAMES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG.format(format=kind))
        (repository / name / "resnet50_labels.txt").write_text("\n".join(LABELS) + "\n")
    weights = Weights()
    with tf.Graph().as_default() as graph:
        tf.identity(resnet50(v1.placeholder(tf.float32, [None, 224, 224, 3], "input"), weights.new), name="output")
    (repository / "resnet50" / "1" / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    module = tf.Module()
    module.weights = [tf.Variable(array) for array in weights.arrays]

    @tf.function(input_signature=[tf.TensorSpec([None, 224, 224, 3], tf.float32, name="input")])
    def serve(images: Any) -> Any:
        return {"output": resnet50(images, one_by_one(module.weights))}

    tf.saved_model.save(module, str(repository / "resnet50_savedmodel" / "1" / "model.savedmodel"), signatures=serve)
    expected = serve(tf.constant(IMAGES))["output"].numpy()
    served = Served(repository)
    yield served, expected
    served.close()


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_answer_what_tensorflow_computes(served: tuple[Served, Any], name: str) -> None:
    engine, expected = served
    engine.load(name)
    try:
        answer = engine.infer(name, {"input": IMAGES})["output"]
        assert answer.shape == (2, 1000)
        np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-6)
        assert expected.std() > 1e-4
        assert engine.config(name).proto.input[0].format == 1  # FORMAT_NHWC
        assert [group.kind for group in engine.config(name).instance_groups] == ["cpu"]
        (version,) = engine.plane.statistics(name)
        assert version.labels["output"] == LABELS
    finally:
        engine.unload(name)
