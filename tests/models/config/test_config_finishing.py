# SPDX-License-Identifier: Apache-2.0
"""What is filled in: by the backend, then by defaults; what somebody wrote stays."""

import pytest
from google.protobuf import text_format

from headrace.core.dtypes import FP32, INT64
from headrace.models.config.completion import complete, fill_missing
from headrace.models.config.drafts import read_draft
from headrace.models.config.messages import new_config
from headrace.models.config.types import DynamicBatching, InstanceGroup, VersionPolicy

TOLD = """
max_batch_size: 4
input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "b" data_type: TYPE_INT64 dims: [ 1 ] reshape { } }
output { name: "c" data_type: TYPE_FP32 dims: [ 3 ] }
dynamic_batching { }
default_model_filename: "told.py"
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
def finished(folder):
    def make(text, told=None, gpus=0, **where):
        message = None if told is None else text_format.Parse(told, new_config())
        return complete(read_draft(folder(text, **where)), message, gpus)

    return make


def test_a_backend_may_provide_everything(finished):
    config = finished('backend: "python"', TOLD)
    assert config.max_batch_size == 4
    assert [(spec.name, spec.dtype, spec.dims, spec.reshape) for spec in config.inputs] == [
        ("a", FP32, (2,), None),
        ("b", INT64, (1,), ()),
    ]
    assert config.outputs[0].name == "c"
    assert config.scheduling == DynamicBatching()
    assert config.decoupled and config.default_model_filename == "told.py"


def test_what_was_written_stays(finished):
    text = """backend: "python" max_batch_size: 2 default_model_filename: "mine.py"
    input { name: "b" } output { name: "c" data_type: TYPE_FP16 dims: 9 }
    sequence_batching { } model_transaction_policy { decoupled: false }"""
    config = finished(text, TOLD)
    assert config.max_batch_size == 2
    assert [(spec.name, spec.dtype, spec.dims, spec.reshape) for spec in config.inputs] == [("b", INT64, (1,), ())]
    assert config.outputs[0].dtype is not None and config.outputs[0].dtype.name == "FP16"
    assert config.outputs[0].dims == (9,)
    assert not isinstance(config.scheduling, DynamicBatching)
    assert not config.decoupled and config.default_model_filename == "mine.py"


def test_an_explicit_zero_is_not_an_omission(finished):
    config = finished('backend: "python" max_batch_size: 0 input { name: "a" }', TOLD)
    assert config.max_batch_size == 0 and config.scheduling is None
    # The batch dimension is now one of the model's own.
    assert config.inputs[0].dims == (-1, 2) and config.outputs[0].dims == (-1, 3)


def test_merging_keeps_explicit_values():
    parse = text_format.Parse(TOLD, new_config())
    message = new_config(name="m")
    fill_missing(message, parse, keep_batch_size=True)
    assert parse == text_format.Parse(TOLD, new_config())
    assert message.name == "m"


@pytest.mark.parametrize(
    ("text", "others", "filename"),
    [
        ('backend: "onnxruntime"', (), "model.onnx"),
        ('platform: "tensorflow_graphdef"', (), "model.graphdef"),
        ('backend: "tensorflow"', (), "model.savedmodel"),
        ('backend: "tensorflow"', ("1/model.graphdef",), "model.graphdef"),
        ('platform: "tensorrt_plan"', (), "model.plan"),
        ('platform: "caffe2_netdef"', (), "model.netdef"),
        ('backend: "mine"', (), ""),
        ('backend: "mine" default_model_filename: "f"', (), "f"),
    ],
)
def test_file_names(finished, tensors, text, others, filename):
    assert finished(text + tensors, others=others).default_model_filename == filename


@pytest.mark.parametrize(
    ("text", "platform"),
    [
        ('backend: "onnxruntime"', "onnxruntime_onnx"),
        ('backend: "onnxruntime" default_model_filename: "best"', "onnxruntime_onnx"),
        ('backend: "tensorflow" default_model_filename: "net.graphdef"', "tensorflow_graphdef"),
        ('platform: "tensorrt_plan"', "tensorrt_plan"),
        ('backend: "python"', ""),
        ('backend: "mine"', ""),
    ],
)
def test_the_platform_is_tritons_name_of_the_format(finished, text, platform):
    tensors = " input { name: 'x' data_type: TYPE_FP32 dims: 4 } output { name: 'y' data_type: TYPE_FP32 dims: 4 }"
    assert finished(text + tensors).platform == platform


@pytest.mark.parametrize(
    ("text", "gpus", "groups"),
    [
        ("", 0, [InstanceGroup("m", "cpu", 1)]),
        ("", 2, [InstanceGroup("m", "gpu", 1, (0, 1))]),
        ("instance_group { count: 3 }", 0, [InstanceGroup("m_0", "cpu", 3)]),
        (
            'instance_group [ { gpus: 1 }, { kind: KIND_CPU name: "n" }, { kind: KIND_MODEL runs: RUNS_INLINE } ]',
            2,
            [InstanceGroup("m_0", "gpu", 1, (1,)), InstanceGroup("n"), InstanceGroup("m_2", "model", runs="inline")],
        ),
    ],
)
def test_groups(finished, tensors, text, gpus, groups):
    assert finished(f'backend: "onnxruntime"{tensors}{text}', gpus=gpus).instance_groups == tuple(groups)


def test_python_models_stay_on_the_cpu_by_default(finished, tensors):
    assert finished(f'backend: "python"{tensors}', gpus=2).instance_groups[0].kind == "cpu"
    reported = finished(f'backend: "python"{tensors}instance_group {{ kind: KIND_GPU }}', gpus=2)
    assert reported.instance_groups[0].gpus == (0, 1)


def test_the_newest_version_is_served_by_default(finished, tensors):
    assert finished(f'backend: "python"{tensors}').version_policy == VersionPolicy("latest", 1)
    specific = finished(f'backend: "python"{tensors}version_policy {{ specific {{ versions: [ 3, 1 ] }} }}')
    assert specific.version_policy == VersionPolicy("specific", specific=(3, 1))
    assert finished(f'backend: "python"{tensors}version_policy {{ all {{ }} }}').version_policy.kind == "all"


def test_no_preferred_size_means_any(finished, tensors):
    config = finished(f'backend: "python" max_batch_size: 8{tensors}dynamic_batching {{ }}')
    assert config.scheduling == DynamicBatching()


def test_the_message_shows_the_defaults_and_the_draft_stays(folder, tensors):
    draft = read_draft(folder(f'backend: "python"{tensors}'))
    config = complete(draft, None)
    assert config.proto.version_policy.latest.num_versions == 1
    assert config.proto.instance_group[0].name == "m"
    assert not draft.message.instance_group


def test_a_draft_is_typed_as_far_as_possible(tmp_path):
    config = read_draft(tmp_path).typed()
    assert config.name == tmp_path.name and config.backend == "" and config.inputs == ()
