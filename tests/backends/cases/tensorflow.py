# SPDX-License-Identifier: Apache-2.0
"""TensorFlow models: frozen graphs, and SavedModels of TensorFlow 2 and 1 with variables, tables and strings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from case import Arrays, Case

from headrace.backends.tensorflow.runtime import tf
from headrace.core.dtypes import bf16_to_float32, float32_to_bf16

v1 = tf.compat.v1

_RANDOM = np.random.default_rng(6)
_FIRST = _RANDOM.standard_normal((16, 32)).astype(np.float32)
_SECOND = _RANDOM.standard_normal((32, 3)).astype(np.float32)
_WORDS = ["ein", "zwei", "größer", "drei"]


def _folder(folder: Path, config: str) -> Path:
    (folder / "1").mkdir()
    (folder / "config.pbtxt").write_text(config)
    return folder / "1"


def _write_graph(folder: Path, config: str, build: Callable[[], Any]) -> None:
    with tf.Graph().as_default() as graph:
        build()
    (_folder(folder, config) / "model.graphdef").write_bytes(graph.as_graph_def().SerializeToString())


def write_simple(folder: Path) -> None:
    """The seed's example."""
    config = """platform: "tensorflow_graphdef"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
dynamic_batching { }
"""

    def build() -> None:
        first, second = (v1.placeholder(tf.int32, [None, 16], name=f"INPUT{index}") for index in (0, 1))
        tf.add(first, second, name="OUTPUT0")
        tf.subtract(first, second, name="OUTPUT1")

    _write_graph(folder, config, build)


def simple_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(-999, 999, (rows, 16)).astype(np.int32) for name in ("INPUT0", "INPUT1")}


def simple_expected(given: Arrays) -> Arrays:
    return {"OUTPUT0": given["INPUT0"] + given["INPUT1"], "OUTPUT1": given["INPUT0"] - given["INPUT1"]}


def write_fixed(folder: Path) -> None:
    """No batch, a size that varies, and the narrow types."""
    config = """platform: "tensorflow_graphdef"
input [
  { name: "IMAGE" data_type: TYPE_BF16 dims: [ 3, -1 ] },
  { name: "SCALE" data_type: TYPE_FP16 dims: [ 1 ] }
]
output [ { name: "SCALED" data_type: TYPE_FP16 dims: [ 3, -1 ] }, { name: "SAME" data_type: TYPE_BF16 dims: [ 3, -1 ] } ]
"""

    def build() -> None:
        image = v1.placeholder(tf.bfloat16, [3, None], name="IMAGE")
        scale = v1.placeholder(tf.float16, [1], name="SCALE")
        tf.multiply(tf.cast(image, tf.float16), scale, name="SCALED")
        tf.identity(image, name="SAME")

    _write_graph(folder, config, build)


def fixed_inputs(rows: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    image = random.integers(0, 100, (3, int(random.integers(1, 9)))).astype(np.float32)
    return {"IMAGE": float32_to_bf16(image), "SCALE": random.integers(1, 9, 1).astype(np.float16)}


def fixed_expected(given: Arrays) -> Arrays:
    return {"SCALED": bf16_to_float32(given["IMAGE"]).astype(np.float16) * given["SCALE"], "SAME": given["IMAGE"]}


_MLP_CONFIG = """platform: "tensorflow_savedmodel"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "best" data_type: TYPE_INT64 dims: [ 1 ] } ]
dynamic_batching { }
"""


def write_mlp(folder: Path) -> None:
    module = tf.Module()
    module.weights = [tf.Variable(_FIRST), tf.Variable(_SECOND)]

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])
    def serve(x: Any) -> Any:
        y = tf.nn.relu(x @ module.weights[0]) @ module.weights[1]
        return {"y": y, "best": tf.argmax(y, axis=1)[:, None]}

    tf.saved_model.save(module, str(_folder(folder, _MLP_CONFIG) / "model.savedmodel"), signatures=serve)


def mlp_inputs(rows: int, seed: int) -> Arrays:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float32)}


def mlp_expected(given: Arrays) -> Arrays:
    y = np.maximum(given["x"] @ _FIRST, 0) @ _SECOND
    return {"y": y, "best": y.argmax(axis=1, keepdims=True)}


def write_words(folder: Path) -> None:
    """A table that is read from an asset, by TensorFlow 1's own way to save."""
    config = """platform: "tensorflow_savedmodel"
max_batch_size: 8
input { name: "words" data_type: TYPE_STRING dims: [ 2 ] }
output [ { name: "ids" data_type: TYPE_INT64 dims: [ 2 ] }, { name: "twice" data_type: TYPE_STRING dims: [ 2 ] } ]
dynamic_batching { }
"""
    version = _folder(folder, config)
    (folder / "words.txt").write_text("\n".join(_WORDS) + "\n")
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        words = v1.placeholder(tf.string, [None, 2])
        filename = tf.constant(str(folder / "words.txt"))
        rows = tf.lookup.TextFileInitializer(
            filename, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        ids = tf.lookup.StaticHashTable(rows, -1).lookup(words)
        session.run(v1.tables_initializer())
        twice = tf.strings.join([words, words])
        infos = [
            {name: v1.saved_model.build_tensor_info(tensor) for name, tensor in tensors.items()}
            for tensors in ({"words": words}, {"ids": ids, "twice": twice})
        ]
        builder = v1.saved_model.Builder(str(version / "model.savedmodel"))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": v1.saved_model.build_signature_def(*infos, "tensorflow/serving/predict")},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()
    # What is read from now on is the model's own copy.
    (folder / "words.txt").unlink()


def words_inputs(rows: int, seed: int) -> Arrays:
    words = np.random.default_rng(seed).choice([*_WORDS, "nirgends", ""], (rows, 2))
    return {"words": np.array([[word.encode() for word in row] for row in words.tolist()], dtype=object)}


def words_expected(given: Arrays) -> Arrays:
    known = {word.encode(): index for index, word in enumerate(_WORDS)}
    ids = [[known.get(word, -1) for word in row] for row in given["words"].tolist()]
    twice = [[word + word for word in row] for row in given["words"].tolist()]
    return {"ids": np.array(ids, np.int64), "twice": np.array(twice, dtype=object)}


_PROGRAM = "model.savedmodel/saved_model.pb"
_WEIGHTS = "model.savedmodel/variables/variables.data-00000-of-00001"

CASES = [
    Case("tensorflow_simple", write_simple, simple_inputs, simple_expected, "model.graphdef", needs_config=False),
    Case(
        "tensorflow_fixed",
        write_fixed,
        fixed_inputs,
        fixed_expected,
        "model.graphdef",
        batches=False,
        needs_config=False,
    ),
    Case("tensorflow_mlp", write_mlp, mlp_inputs, mlp_expected, _PROGRAM, needs_config=False),
    Case("tensorflow_weights", write_mlp, mlp_inputs, mlp_expected, _WEIGHTS, needs_config=False),
    Case("tensorflow_words", write_words, words_inputs, words_expected, _PROGRAM, needs_config=False),
]
