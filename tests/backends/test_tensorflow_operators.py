# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's graphs are programs: what the backend refuses to run of them, wherever it hides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import configured, graph, identity, open_instance, placed, saved, saved_v1, tf, v1

from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument
from support.late_imports import late

pytestmark = pytest.mark.worker("frameworks")

SavedModel = late("headrace.backends.tensorflow.runtime", "SavedModel")
ROWS = {"X": np.ones((1, 4), np.float32)}
TRUSTED = configured(parameters={"allow_file_operators": "1"})


def rows_of_four() -> Any:
    """The input of these models."""
    return tf.TensorSpec([None, 4], tf.float32, name="X")


def written(path: Path, x: Any) -> Any:
    """x, after a file was written."""
    with tf.control_dependencies([tf.io.write_file(str(path), "canary")]):
        return tf.identity(x, name="Y")


def branched(path: Path, x: Any) -> Any:
    """The same inside the branch of a condition, which is a function of the graph's library."""
    return tf.cond(tf.reduce_sum(x) > 0, lambda: written(path, x), lambda: x)


@pytest.mark.parametrize("work", [written, branched])
def test_files_are_not_written_unless_the_model_is_trusted(tmp_path: Path, work: Any) -> None:
    canary = tmp_path / "canary"

    def build() -> None:
        answer = work(canary, v1.placeholder(tf.float32, [None, 4], name="X"))
        if answer.op.name != "Y":
            tf.identity(answer, name="Y")

    graphdef = placed(tmp_path / "graphdef", graph(build))
    savedmodel = saved(tmp_path / "savedmodel", lambda x: {"Y": work(canary, x)}, rows_of_four())
    for files in (graphdef, savedmodel):
        with pytest.raises(
            InvalidArgument, match=r"of type WriteFile, which reads or writes files .*allow_file_operators"
        ):
            open_instance(configured(), files)
        assert not canary.exists()
        open_instance(TRUSTED, files).compute(ROWS, ["Y"])
        assert canary.read_text() == "canary"
        canary.unlink()


def test_python_is_never_run(tmp_path: Path) -> None:
    def own(array: Any) -> Any:
        raise AssertionError("the model's code ran")

    for index, function in enumerate((tf.py_function, tf.numpy_function)):
        files = saved(
            tmp_path / str(index),
            lambda x, call=function: {"Y": tf.ensure_shape(call(own, [x], tf.float32), [None, 4])},
            rows_of_four(),
        )
        for config in (configured(), TRUSTED):
            with pytest.raises(InvalidArgument, match=r"of type (EagerPyFunc|PyFunc), which runs Python code"):
                open_instance(config, files)


def add_one() -> Any:
    return tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([], tf.float32))


@pytest.mark.parametrize(
    ("operator", "use"),
    [
        ("ReadFile", lambda: tf.io.read_file("/etc/hostname")),
        ("MatchingFiles", lambda: tf.io.matching_files("/etc/*")),
        ("PrintV2", lambda: tf.print("x", output_stream="file:///tmp/headrace-canary")),
        (
            "ImmutableConst",
            lambda: tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[4], memory_region_name="/etc/hostname"),
        ),
        (
            "TextLineDataset",
            lambda: tf.raw_ops.TextLineDataset(filenames="/etc/hostname", compression_type="", buffer_size=9),
        ),
        ("DecodeProtoV2", lambda: tf.io.decode_proto(["x"], "M", ["f"], [tf.int32], descriptor_source="/etc/hostname")),
        ("RemoteCall", lambda: tf.raw_ops.RemoteCall(target="/job:other", args=[1.0], Tout=[tf.float32], f=add_one())),
    ],
)
def test_unused_nodes_are_refused_too(tmp_path: Path, operator: str, use: Callable[[], Any]) -> None:
    def build() -> None:
        tf.identity(v1.placeholder(tf.float32, [None, 4], name="X"), name="Y")
        use()

    with pytest.raises(InvalidArgument, match=f"of type {operator}, which"):
        open_instance(configured(), placed(tmp_path, graph(build)))


def test_printing_to_the_log_is_harmless(tmp_path: Path) -> None:
    def build() -> None:
        with tf.control_dependencies([tf.print("x")]):
            tf.identity(v1.placeholder(tf.float32, [None, 4], name="X"), name="Y")

    assert open_instance(configured(), placed(tmp_path, graph(build))).compute(ROWS, ["Y"])["Y"].shape == (1, 4)


def test_checkpoints_are_read_to_restore_a_model_and_for_nothing_else(tmp_path: Path) -> None:
    def build(reached: bool) -> Callable[[], None]:
        def work() -> None:
            x = v1.placeholder(tf.float32, [None, 4], name="X")
            (found,) = tf.raw_ops.RestoreV2(
                prefix="/somewhere", tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32]
            )
            tf.identity(x + found if reached else x, name="Y")

        return work

    # Graphs that were frozen by hand keep the nodes of their Saver.
    assert open_instance(configured(), placed(tmp_path, graph(build(False)))).compute(ROWS, ["Y"])["Y"].shape == (1, 4)
    with pytest.raises(InvalidArgument, match="of type RestoreV2, which reads or writes files"):
        open_instance(configured(), placed(tmp_path, graph(build(True))))


def test_a_model_may_not_save_when_it_is_restored(tmp_path: Path) -> None:
    module = tf.Module()
    module.bias = tf.Variable(tf.ones(4))
    files = saved(tmp_path, lambda x: {"Y": x + module.bias}, rows_of_four(), module=module)
    file = files.version_folder / "model.savedmodel" / "saved_model.pb"
    assert open_instance(configured(), files).compute(ROWS, ["Y"])["Y"].tolist() == [[2] * 4]
    changed = SavedModel.FromString(file.read_bytes())
    saver = changed.meta_graphs[0].saver_def
    saver.restore_op_name = saver.save_tensor_name.partition(":")[0]
    file.write_bytes(changed.SerializeToString())
    with pytest.raises(InvalidArgument, match="of type (SaveV2|MergeV2Checkpoints), which reads or writes files"):
        open_instance(configured(), files)


def table_of(filename: Any) -> Any:
    index = tf.lookup.TextFileIndex
    rows = tf.lookup.TextFileInitializer(filename, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    return tf.lookup.StaticHashTable(rows, -1)


@pytest.mark.parametrize("how", ["constant", "joined", "variable"])
def test_tables_are_not_read_from_the_servers_files(tmp_path: Path, how: str) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a\n")

    def build(session: Any) -> tuple[Any, Any]:
        x = v1.placeholder(tf.float32, [None, 4])
        filename: Any = tf.constant(str(secret))
        if how == "joined":
            filename = tf.strings.join([str(tmp_path), "/secret.txt"])
        if how == "variable":
            filename = v1.get_variable("path", initializer=filename, use_resource=True).read_value()
            session.run(v1.global_variables_initializer())
        table = table_of(filename)
        return {"X": x}, {"Y": x + tf.cast(table.lookup(tf.constant("a")), tf.float32)}

    files = saved_v1(tmp_path, build)
    file = files.version_folder / "model.savedmodel" / "saved_model.pb"
    for meta in (changed := SavedModel.FromString(file.read_bytes())).meta_graphs:
        # As a model would say it that has no assets, but wants its table filled.
        init = next(node.name for node in meta.graph_def.node if node.op.startswith("InitializeTableFromTextFile"))
        meta.collection_def["saved_model_main_op"].node_list.value.append(init)
        del meta.asset_file_def[:]
    file.write_bytes(changed.SerializeToString())
    with pytest.raises(InvalidArgument, match="reads a file that is not one of the model's assets"):
        open_instance(configured(), files)
    assert open_instance(TRUSTED, files).compute(ROWS, ["Y"])["Y"].tolist() == [[1] * 4]


def test_an_asset_stays_in_its_folder(tmp_path: Path) -> None:
    files = saved(tmp_path, lambda x: {"Y": x + 1}, rows_of_four())
    file = files.version_folder / "model.savedmodel" / "saved_model.pb"
    (tmp_path / "secret.txt").write_text("a\n")
    for filename in ("../../../../secret.txt", str(tmp_path / "secret.txt")):
        changed = SavedModel.FromString(file.read_bytes())
        changed.meta_graphs[0].asset_file_def.add(filename=filename).tensor_info.name = "Const:0"
        broken = placed(tmp_path / "broken", None)
        (broken.version_folder / "model.savedmodel").mkdir(exist_ok=True)
        (broken.version_folder / "model.savedmodel" / "saved_model.pb").write_bytes(changed.SerializeToString())
        with pytest.raises(InvalidArgument, match="which its graph reads"):
            open_instance(configured(), broken)


def test_plain_graphs_pass(tmp_path: Path) -> None:
    instance = open_instance(configured({"X": (FP32, (4,))}), placed(tmp_path, identity()))
    assert instance.compute(ROWS, ["Y"])["Y"].shape == (1, 4)
