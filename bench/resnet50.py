# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 as a plan, from which each framework builds its own model.

The plan is walked with somebody's `Layers`: those of ONNX, PyTorch and TensorFlow write a file, those of numpy here
compute what the right answer is. The weights are random, 25.6 million numbers or 102 MB, and the same every time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

SEED = 2026
CLASSES = 1000
IMAGE = (3, 224, 224)
# Blocks and inner width of each stage; the first block of all stages but the first halves the image.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
WIDENING = 4
EPSILON = 1e-5
# What a block adds to its input, at most; with 1, the numbers would double from block to block.
LAST_SCALE = 0.4
SMALL_WIDTH = 16


@dataclass(frozen=True)
class Convolution:
    """A square convolution with the normalisation after it; padded so that only the stride makes the image smaller."""

    taken: int
    given: int
    size: int
    stride: int
    scale: float = 1.0

    @property
    def padding(self) -> int:
        return self.size // 2


@dataclass(frozen=True)
class Weights:
    """The kernel is out, in, height, width."""

    kernel: np.ndarray
    scale: np.ndarray
    shift: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class Layers(Protocol):
    """What a framework must be able to do; a value is whatever it calls one."""

    def conv(self, name: str, value: Any) -> Any: ...
    def relu(self, value: Any) -> Any: ...
    def add(self, left: Any, right: Any) -> Any: ...
    def max_pool(self, value: Any) -> Any: ...
    def mean(self, value: Any) -> Any: ...
    def dense(self, name: str, value: Any) -> Any: ...


Plan = Callable[[Layers, Any], Any]


def resnet50(layers: Layers, value: Any) -> Any:
    """Walk the plan. The stride is in the 3x3 convolution, as torchvision has it."""
    value = layers.max_pool(layers.relu(layers.conv("stem", value)))
    for block in BLOCKS:
        straight = layers.conv(f"{block}_straight", value) if f"{block}_straight" in CONVOLUTIONS else value
        inner = layers.relu(layers.conv(f"{block}_a", value))
        inner = layers.relu(layers.conv(f"{block}_b", inner))
        value = layers.relu(layers.add(layers.conv(f"{block}_c", inner), straight))
    return layers.dense("head", layers.mean(value))


def small(layers: Layers, value: Any) -> Any:
    """The least that makes a framework start: one row of 16 numbers in, 16 out."""
    return layers.relu(layers.dense("small", value))


def _convolutions() -> dict[str, Convolution]:
    convolutions, inputs = {"stem": Convolution(3, 64, 7, 2)}, 64
    for stage, (blocks, width) in enumerate(STAGES, start=1):
        for block in range(1, blocks + 1):
            name, outputs = f"stage{stage}_block{block}", width * WIDENING
            stride = 2 if block == 1 and stage > 1 else 1
            convolutions[f"{name}_a"] = Convolution(inputs, width, 1, 1)
            convolutions[f"{name}_b"] = Convolution(width, width, 3, stride)
            convolutions[f"{name}_c"] = Convolution(width, outputs, 1, 1, LAST_SCALE)
            if block == 1:
                convolutions[f"{name}_straight"] = Convolution(inputs, outputs, 1, stride)
            inputs = outputs
    return convolutions


CONVOLUTIONS = _convolutions()
BLOCKS = tuple(name.removesuffix("_a") for name in CONVOLUTIONS if name.endswith("_a"))
DENSE = {"head": (STAGES[-1][1] * WIDENING, CLASSES), "small": (SMALL_WIDTH, SMALL_WIDTH)}


def conv_weights(name: str) -> Weights:
    """Random, and such that the numbers neither vanish nor grow on their way."""
    conv, random = CONVOLUTIONS[name], _random(name)
    inputs = conv.taken * conv.size**2
    kernel = random.standard_normal((conv.given, conv.taken, conv.size, conv.size), dtype=np.float32)
    scale, shift, mean, variance = (
        (centre + width * random.standard_normal(conv.given)).astype(np.float32)
        for centre, width in ((conv.scale, 0.05), (0, 0.1), (0, 0.1), (1, 0.05))
    )
    return Weights(kernel * np.float32(np.sqrt(2 / inputs)), scale, shift, mean, np.maximum(variance, np.float32(0.5)))


def dense_weights(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Matrix (in, out) and bias."""
    random, (inputs, outputs) = _random(name), DENSE[name]
    matrix = random.standard_normal((inputs, outputs), dtype=np.float32) / np.float32(np.sqrt(inputs))
    return matrix, (random.standard_normal(outputs) * 0.1).astype(np.float32)


def answer(images: np.ndarray) -> np.ndarray:
    """What the network makes of these images (rows, channels, height, width), in double precision; takes seconds."""
    return np.asarray(resnet50(_NumpyLayers(), images.astype(np.float64)))


def _random(name: str) -> np.random.Generator:
    # By name and not in turn, so that each framework may ask in its own order.
    return np.random.default_rng([SEED, *name.encode()])


class _NumpyLayers:
    def conv(self, name: str, value: np.ndarray) -> np.ndarray:
        conv, weights = CONVOLUTIONS[name], conv_weights(name)
        windows = _windows(value, conv.size, conv.stride, conv.padding)
        product = np.tensordot(windows, weights.kernel.astype(np.float64), axes=((1, 4, 5), (1, 2, 3)))
        normal = (product - weights.mean) / np.sqrt(weights.variance + EPSILON) * weights.scale + weights.shift
        return normal.transpose(0, 3, 1, 2)

    def relu(self, value: np.ndarray) -> np.ndarray:
        return np.maximum(value, 0)

    def add(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left + right

    def max_pool(self, value: np.ndarray) -> np.ndarray:
        # What is pooled comes from a ReLU, so the zeros around the image never win over it.
        return np.asarray(_windows(value, 3, 2, 1).max(axis=(4, 5)))

    def mean(self, value: np.ndarray) -> np.ndarray:
        return np.asarray(value.mean(axis=(2, 3)))

    def dense(self, name: str, value: np.ndarray) -> np.ndarray:
        matrix, bias = dense_weights(name)
        return np.asarray(value @ matrix.astype(np.float64) + bias)


def _windows(value: np.ndarray, size: int, stride: int, padding: int) -> np.ndarray:
    """Rows, channels, height, width, and the size x size numbers around each place."""
    padded = np.pad(value, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
