# SPDX-License-Identifier: Apache-2.0
"""SavedModels: signatures and tags, variables, tables, those of TensorFlow 1, and folders that are none."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import (
    NO_SERVICES,
    TensorFlowBackend,
    configured,
    open_instance,
    placed,
    saved,
    saved_v1,
    tf,
    v1,
    version_folder,
)

from headrace.backends.contract import ModelFiles
from headrace.backends.signature import DEFAULT_MAX_BATCH_SIZE
from headrace.core.dtypes import BYTES, FP32, INT64
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.late_imports import late

pytestmark = pytest.mark.worker("frameworks")

SavedModel = late("headrace.backends.tensorflow.runtime", "SavedModel")
read_savedmodel = late("headrace.backends.tensorflow.savedmodel", "read_savedmodel")
ROWS = {"x": np.array([[1, 2, 3, 4]], np.float32)}
CONFIG = configured({"x": (FP32, (4,))}, {"y": (FP32, (4,))})


def rows_of_four() -> Any:
    """The input of these models."""
    return tf.TensorSpec([None, 4], tf.float32, name="x")


def parameterised(**parameters: str) -> Any:
    return configured({"x": (FP32, (4,))}, {"y": (FP32, (4,))}, parameters=parameters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Doubles and adds a variable; its signature `negative` does something else."""
    module = tf.Module()
    module.bias = tf.Variable(tf.ones(4))
    return saved(
        tmp_path_factory.mktemp("savedmodel"),
        lambda x: {"y": x * 2 + module.bias},
        rows_of_four(),
        module=module,
        negative=lambda x: {"y": -x},
    )


@pytest.fixture
def own(model: ModelFiles, tmp_path: Path) -> ModelFiles:
    """The same, to be broken."""
    shutil.copytree(model.model_folder, tmp_path / "test")
    return ModelFiles(tmp_path / "test", 1, tmp_path / "test" / "1")


def computed(config: Any, files: ModelFiles) -> Any:
    instance = open_instance(config, files)
    answer = instance.compute(ROWS, ["y"])["y"].tolist()
    instance.close()
    return answer


def test_a_signature_is_chosen_by_its_name(model: ModelFiles) -> None:
    assert computed(CONFIG, model) == [[3, 5, 7, 9]]
    assert computed(parameterised(TF_SIGNATURE_DEF="negative"), model) == [[-1, -2, -3, -4]]
    with pytest.raises(InvalidArgument, match="no signature 'no': it has negative, serving_default"):
        open_instance(parameterised(TF_SIGNATURE_DEF="no"), model)
    with pytest.raises(InvalidArgument, match="no graph with the tags train: it has serve. Set .*TF_GRAPH_TAG"):
        open_instance(parameterised(TF_GRAPH_TAG="train"), model)


def test_the_signature_completes_a_configuration(model: ModelFiles) -> None:
    message = TensorFlowBackend().complete(configured({}, {}, max_batch_size=0), model)
    assert message is not None
    assert message.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in message.input] == [("x", 11, [4])]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in message.output] == [("y", 11, [4])]
    assert TensorFlowBackend().complete(CONFIG, version_folder(model.model_folder.parent / "none")) is None


def test_a_configuration_for_another_model_is_refused(model: ModelFiles) -> None:
    with pytest.raises(InvalidArgument, match="unexpected inference input 'serving_default_x', allowed inputs are: x"):
        open_instance(configured({"serving_default_x": (FP32, (4,))}, {"y": (FP32, (4,))}), model)
    with pytest.raises(InvalidArgument, match=r"has shape \[-1, 3\] by the configuration"):
        open_instance(configured({"x": (FP32, (3,))}, {"y": (FP32, (4,))}), model)


def test_a_model_of_tensorflow_1_with_variables(tmp_path: Path) -> None:
    def build(_: Any) -> tuple[Any, Any]:
        x = v1.placeholder(tf.float32, [None, 4])
        bias = v1.get_variable("bias", initializer=np.full(4, 2, np.float32), use_resource=False)
        y = x + bias
        return {"x": x}, {"y": y, "again": y, "same": x}

    # The only signature need not have the usual name; one output is the input itself, two are the same.
    files = saved_v1(tmp_path, build, tags=["serve", "gpu"], name="predict")
    config = configured(
        {"x": (FP32, (4,))},
        {"y": (FP32, (4,)), "same": (FP32, (4,)), "again": (FP32, (4,))},
        parameters={"TF_GRAPH_TAG": "gpu, serve"},
        platform="tensorflow_savedmodel",
    )
    answer = open_instance(config, files).compute(ROWS, ["y", "same", "again"])
    assert answer["y"].tolist() == answer["again"].tolist() == [[3, 4, 5, 6]]
    assert answer["same"].tolist() == ROWS["x"].tolist()


@pytest.mark.parametrize("way", ["save", "export"])
def test_a_model_of_keras(tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(action="ignore"):  # Keras's own, at import
        layers = [tf.keras.layers.Dense(3, activation="relu"), tf.keras.layers.Dense(2)]
        network = tf.keras.Sequential([tf.keras.Input([4], name="x"), *layers])
        files = version_folder(tmp_path)
        folder = str(files.version_folder / "model.savedmodel")
        if way == "export":
            network.export(folder, verbose=False)
        else:
            # What Keras saves like this restores variables that its signature does not read.
            serve = tf.function(lambda x: {"y": network(x)}).get_concrete_function(rows_of_four())
            tf.saved_model.save(network, folder, signatures=serve)
    message = TensorFlowBackend().complete(configured({}, {}, max_batch_size=0), files)
    assert message is not None
    (given,), (wanted,) = message.input, message.output
    instance = open_instance(configured({given.name: (FP32, (4,))}, {wanted.name: (FP32, (2,))}), files)
    answer = instance.compute({given.name: ROWS["x"]}, [wanted.name])[wanted.name]
    np.testing.assert_allclose(answer, network(ROWS["x"]).numpy(), rtol=1e-5)
    instance.close()
    shutil.rmtree(files.version_folder / "model.savedmodel" / "variables")
    with pytest.raises(FailedPrecondition, match="which hold its weights"):
        open_instance(configured({given.name: (FP32, (4,))}, {wanted.name: (FP32, (2,))}), files)


def test_a_table_is_read_from_the_models_own_assets(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a\nb\n")
    index = tf.lookup.TextFileIndex
    rows = tf.lookup.TextFileInitializer(
        str(tmp_path / "words.txt"), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
    )
    module = tf.Module()
    module.table = tf.lookup.StaticHashTable(rows, -1)
    shown = tf.TensorSpec([None], tf.string, name="words")
    files = saved(tmp_path, lambda words: {"ids": module.table.lookup(words)}, shown, module=module)
    (tmp_path / "words.txt").unlink()
    config = configured({"words": (BYTES, ())}, {"ids": (INT64, ())})
    words = np.array([b"b", b"?", b"a"], dtype=object)
    assert open_instance(config, files).compute({"words": words}, ["ids"])["ids"].tolist() == [1, -1, 0]
    (files.version_folder / "model.savedmodel" / "assets" / "words.txt").unlink()
    with pytest.raises(InvalidArgument, match=r"has no file 'model\.savedmodel/assets/words\.txt'"):
        open_instance(config, files)


def test_an_empty_beginning_is_left_out_and_one_that_is_missing_is_not(own: ModelFiles) -> None:
    folder = own.version_folder / "model.savedmodel"
    read = read_savedmodel(CONFIG, folder, None)
    program = SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    init = program.meta_graphs[0].signature_def["__saved_model_init_op"].outputs["__saved_model_init_op"]
    assert init.name == "NoOp"
    assert [step.operation for step in read.setup] == [program.meta_graphs[0].saver_def.restore_op_name]
    init.name = "Gone"
    (folder / "saved_model.pb").write_bytes(program.SerializeToString())
    with pytest.raises(InvalidArgument, match="could not initialise 'model.savedmodel'"):
        open_instance(CONFIG, own)


def test_parts_that_are_missing_are_named(own: ModelFiles) -> None:
    folder = own.version_folder / "model.savedmodel"
    shutil.rmtree(folder / "variables")
    with pytest.raises(
        FailedPrecondition, match=r"no files 'model\.savedmodel/variables/variables\.\*'.*put the whole"
    ):
        open_instance(CONFIG, own)
    (folder / "saved_model.pb").unlink()
    with pytest.raises(FailedPrecondition, match=r"no file 'saved_model\.pb' in 'model\.savedmodel'"):
        open_instance(CONFIG, own)
    shutil.rmtree(folder)
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/model\.savedmodel'"):
        TensorFlowBackend().load(configured(platform="tensorflow_savedmodel"), own, NO_SERVICES)


@pytest.mark.parametrize(
    "part", ["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"]
)
def test_damaged_parts_are_refused(own: ModelFiles, part: str, caplog: pytest.LogCaptureFixture) -> None:
    file = own.version_folder / "model.savedmodel" / part
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"hello"):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"model 'test': TensorFlow .* 'model\.savedmodel") as caught:
            open_instance(CONFIG, own)
        assert "checksum" not in str(caught.value).lower()


def test_a_signature_that_does_not_fit_its_graph_is_refused(own: ModelFiles) -> None:
    file = own.version_folder / "model.savedmodel" / "saved_model.pb"
    changed = SavedModel.FromString(file.read_bytes())
    changed.meta_graphs[0].signature_def["serving_default"].inputs["x"].name = "nowhere:0"
    file.write_bytes(changed.SerializeToString())
    with pytest.raises(
        InvalidArgument, match="'x' is the tensor 'nowhere:0' of type float32, which its graph does not"
    ):
        open_instance(CONFIG, own)


def test_a_signature_may_have_default_values(own: ModelFiles) -> None:
    file = own.version_folder / "model.savedmodel" / "saved_model.pb"
    changed = SavedModel.FromString(file.read_bytes())
    default = tf.make_tensor_proto(np.full((1, 4), 5, np.float32))
    changed.meta_graphs[0].signature_def["serving_default"].defaults["x"].CopyFrom(default)
    file.write_bytes(changed.SerializeToString())
    assert computed(CONFIG, own) == [[3, 5, 7, 9]]
    assert open_instance(CONFIG, own).compute({}, ["y"])["y"].tolist() == [[11] * 4]


def test_nonsense_in_a_signature_is_refused(own: ModelFiles) -> None:
    file = own.version_folder / "model.savedmodel" / "saved_model.pb"
    whole = file.read_bytes()
    for change in (
        lambda signature: setattr(signature.inputs["x"], "dtype", 99),
        lambda signature: setattr(signature.inputs["x"], "dtype", 20),  # a resource
        lambda signature: setattr(signature.inputs["x"].tensor_shape.dim[0], "size", -7),
        lambda signature: setattr(signature.defaults["x"], "dtype", 99),
        lambda signature: signature.inputs["x"].ClearField("name"),
        lambda signature: signature.ClearField("outputs"),
    ):
        changed = SavedModel.FromString(whole)
        change(changed.meta_graphs[0].signature_def["serving_default"])
        file.write_bytes(changed.SerializeToString())
        with pytest.raises(InvalidArgument, match="model 'test'"):
            TensorFlowBackend().complete(configured({}, {}, max_batch_size=0), own)
            open_instance(CONFIG, own)


def test_a_folder_is_not_a_graphdef(tmp_path: Path) -> None:
    files = placed(tmp_path, None)
    (files.version_folder / "model.graphdef").mkdir()
    with pytest.raises(InvalidArgument, match="is a folder, and a tensorflow_graphdef is one file"):
        open_instance(configured(platform="tensorflow_graphdef"), files)
