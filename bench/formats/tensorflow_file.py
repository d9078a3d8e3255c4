# SPDX-License-Identifier: Apache-2.0
"""Write a plan of `bench.resnet50` as a SavedModel. Images are height, width, channels."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from bench.formats import FORMATS
from bench.resnet50 import CONVOLUTIONS, EPSILON, Layers, Plan, conv_weights, dense_weights


class Network(tf.Module, Layers):
    """The plan's numbers are variables by name, as Keras would keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, tf.Variable] = {}

    def conv(self, name: str, value: tf.Tensor) -> tf.Tensor:
        conv = CONVOLUTIONS[name]
        around = [conv.padding, conv.padding]
        value = tf.nn.conv2d(value, self._conv(name, "kernel"), conv.stride, padding=[[0, 0], around, around, [0, 0]])
        numbers = {part: self._conv(name, part) for part in ("scale", "mean", "variance")}
        normal = tf.raw_ops.FusedBatchNormV3(
            x=value, offset=self._conv(name, "shift"), epsilon=EPSILON, is_training=False, **numbers
        )
        return normal.y

    def relu(self, value: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(value)

    def add(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return left + right

    def max_pool(self, value: tf.Tensor) -> tf.Tensor:
        # As Keras does it: padded apart. What is pooled comes from a ReLU, so the zeros never win over it.
        return tf.nn.max_pool2d(tf.pad(value, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")

    def mean(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(value, axis=[1, 2])

    def dense(self, name: str, value: tf.Tensor) -> tf.Tensor:
        matrix, bias = dense_weights(name)
        return tf.matmul(value, self._number(f"{name}_matrix", matrix)) + self._number(f"{name}_bias", bias)

    def _conv(self, name: str, part: str) -> tf.Variable:
        array = getattr(conv_weights(name), part)
        # Ours is out, in, height, width.
        return self._number(f"{name}_{part}", array.transpose(2, 3, 1, 0) if part == "kernel" else array)

    def _number(self, name: str, array: np.ndarray) -> tf.Variable:
        if name not in self.numbers:
            # Not part of the graph that is being traced.
            with tf.init_scope():
                self.numbers[name] = tf.Variable(array, trainable=False, name=name)
        return self.numbers[name]


def write(file: Path, plan: Plan, name: str, input_shape: tuple[int, ...], outputs: int) -> None:
    """Write the plan as `serving_default`, with a free first dimension."""
    kind, network = FORMATS["tensorflow"], Network()
    specification = tf.TensorSpec([None, *input_shape], tf.float32, name=kind.input_name)
    serve = tf.function(lambda value: {kind.output_name: plan(network, value)}, input_signature=[specification])
    tf.saved_model.save(network, str(file), signatures={"serving_default": serve.get_concrete_function()})
