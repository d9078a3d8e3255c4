# SPDX-License-Identifier: Apache-2.0
"""Configurations that are right: the three syntaxes mean the same, old words are known, the backend is found."""

import json
import math
import re

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.dtypes import BYTES, FP32
from headrace.models.config.drafts import draft_from_json, read_draft
from headrace.models.config.messages import new_config, to_json, to_text
from headrace.models.config.schema_check import check_tree
from headrace.models.config.syntax import SyntaxFault, parse_text
from headrace.models.config.types import DynamicBatching

TEXT = """
name: "m" backend: 'py' "thon" ; max_batch_size: 8,  # a comment: { [ "
input [ { name: "x" data_type: TYPE_STRING dims: [ -1, 0x10 ] pad_value: -1.5f optional: t },
        < name: "z" data_type: 11 dims: 3 dims: 010 > ]
output: { name: "y" data_type: TYPE_FP32 dims: [] dims: [ 4 ] }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100
  priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 value { max_queue_size: 3 } } }
parameters { key: "a b" value: { string_value: "c\\n" } }
metric_tags [ { key: "k" value: "v" } ]
"""
JSON = """{"name": "m", "backend": "python", "maxBatchSize": 8, "input": [
 {"name": "x", "data_type": "TYPE_STRING", "dims": ["-1", 16], "padValue": -1.5, "optional": true, "reshape": null},
 {"name": "z", "dataType": 11, "dims": [3, 8.0]}],
 "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
 "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "100", "priority_levels": 2,
   "default_priority_level": 1, "priority_queue_policy": {"1": {"max_queue_size": 3}}},
 "parameters": {"a b": {"string_value": "c\\n"}}, "tags": {"k": "v"}}"""
YAML = """
name: m
backend: python
max_batch_size: 8
input:
  - {name: x, data_type: TYPE_STRING, dims: [-1, 0x10], pad_value: -1.5, optional: yes}
  - name: z
    data_type: TYPE_FP32
    dims: [3, 8]
output: [{name: "y", data_type: TYPE_FP32, dims: [4]}]
dynamic_batching:
  preferred_batch_size: [4, 8]
  max_queue_delay_microseconds: 100
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy: {1: {max_queue_size: 3}}
parameters:
  a b: {string_value: "c\\n"}
metric_tags: {k: v}
"""


def test_the_three_syntaxes_mean_the_same(folder):
    text = read_draft(folder(TEXT))
    other = draft_from_json(folder(TEXT), JSON)
    (text.model_folder / "config.pbtxt").unlink()
    yaml = read_draft(folder(YAML, file="config.yml"))
    assert text.message == other.message == yaml.message
    config = text.typed()
    assert config.backend == "python"
    assert [spec.dtype for spec in config.inputs] == [BYTES, FP32]
    assert config.inputs[0].dims == (-1, 16) and config.inputs[0].pad_value == -1.5 and config.inputs[0].optional
    assert config.inputs[1].dims == (3, 8)
    assert isinstance(config.scheduling, DynamicBatching)
    assert config.scheduling.priority_queue_policies[1].max_queue_size == 3
    assert config.parameters == {"a b": "c\n"} and config.metric_tags == {"k": "v"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.pbtxt", "dynamic_batching {\n max_queue_delay_microseconds\n:\n auto\n latency_target_ms: 5 }"),
        ("config.json", '{"dynamicBatching": {"maxQueueDelayMicroseconds": "auto", "latency_target_ms": 5}}'),
        ("config.yaml", "dynamic_batching:\n  max_queue_delay_microseconds: auto\n  latency_target_ms: 5"),
    ],
)
def test_a_delay_may_be_auto(folder, file, text):
    scheduling = read_draft(folder(text, file=file)).typed().scheduling
    assert scheduling == DynamicBatching(auto_delay=True, latency_target_ms=5)


def test_legacy_terms_in_texts_and_comments_stay(folder):
    text = (
        '# tags: auto\nparameters { key: "tags" value { string_value: "auto" } }\ntags { key: "tags" value: "#auto" }\n'
    )
    message = read_draft(folder(text)).message
    assert message.parameters["tags"].string_value == "auto"
    assert dict(message.metric_tags) == {"tags": "#auto"}


def test_the_lines_of_fields_are_known(folder):
    draft = read_draft(folder(TEXT))
    assert draft.line_of("input[1].dims") == 4
    assert draft.line_of("input[1].format") == 4
    assert draft.line_of("dynamic_batching.priority_queue_policy.1.max_queue_size") == 7
    assert draft.line_of("parameters.a b") == 8
    assert draft.line_of("instance_group[0].count") is None
    assert draft.has_field("max_batch_size") and not draft.has_field("platform")


@pytest.mark.parametrize(
    ("text", "others", "backend"),
    [
        ('backend: "mine" platform: "onnxruntime_onnx"', (), "mine"),
        ('platform: "onnxruntime_onnx"', (), "onnxruntime"),
        ('platform: "tensorflow_graphdef"', (), "tensorflow"),
        ('platform: "strange"', (), "strange"),
        ("ensemble_scheduling { }", ("1/model.onnx",), "ensemble"),
        ("", ("1/model.py",), "python"),
        ("", ("2/model.onnx", "10/model.savedmodel/saved_model.pb"), "tensorflow"),
        ("", ("old/model.py",), ""),
        ('default_model_filename: "resnet.onnx"', (), "onnxruntime"),
        ("", (), ""),
    ],
)
def test_the_backend_is_found(folder, text, others, backend):
    assert read_draft(folder(text, others=others)).backend == backend


def test_without_a_file_the_folder_gives_the_name(tmp_path):
    draft = read_draft(tmp_path)
    assert draft.message.name == tmp_path.name and draft.path is None


def test_a_byte_order_mark_and_windows_lines_are_accepted(folder):
    assert read_draft(folder(b'\xef\xbb\xbfname: "m"\r\nplatform: "x"\r\n')).message.platform == "x"


def is_taken(text, by_protobuf):
    try:
        if by_protobuf:
            return bool(text_format.Parse(text, new_config()))
        return not check_tree(parse_text(text), new_config().DESCRIPTOR, "text").problems
    except (text_format.ParseError, SyntaxFault):
        return False


def test_our_own_check_refuses_nothing_that_protobuf_accepts():
    tokens = re.findall(r'"[^"\n]*"|\w+|\s+|.', TEXT, re.DOTALL)
    without = [f"{''.join(tokens[:at])}{''.join(tokens[at + 1 :])}" for at in range(len(tokens))]
    taken = [text for text in without if is_taken(text, by_protobuf=True)]
    assert len(taken) > 50
    assert [text for text in taken if not is_taken(text, by_protobuf=False)] == []


NAMES = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12)
SIZES = st.lists(st.integers(-1, 1 << 40), max_size=4)


@st.composite
def messages(draw):
    message = new_config(name=draw(NAMES), max_batch_size=draw(st.integers(-(1 << 31), (1 << 31) - 1)))
    message.metric_tags.update(draw(st.dictionaries(NAMES, NAMES, max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.input.add(name=draw(NAMES), data_type=draw(st.integers(0, 14)), dims=draw(SIZES))
        if draw(st.booleans()):
            tensor.pad_value = draw(st.floats(allow_nan=False))
        if draw(st.booleans()):
            tensor.reshape.shape.extend(draw(SIZES))
    for level in draw(st.sets(st.integers(0, (1 << 64) - 1), max_size=3)):
        message.dynamic_batching.priority_queue_policy[level].max_queue_size = 1
    for key in draw(st.sets(NAMES, max_size=3)):
        message.parameters[key].string_value = draw(NAMES)
    if draw(st.booleans()):
        message.instance_group.add(kind=draw(st.integers(0, 3)), runs=draw(st.integers(0, 2)), gpus=[0, 1])
    return message


@given(messages())
@settings(max_examples=60, deadline=None)
def test_what_is_shown_reads_back(message):
    text = to_text(message)
    fitted = check_tree(parse_text(text), message.DESCRIPTOR, "text")
    assert fitted.problems == []
    assert text_format.Parse(fitted.edited(text), new_config()) == message


@given(messages())
@settings(max_examples=60, deadline=None)
def test_json_reads_back(tmp_path_factory, message):
    folder = tmp_path_factory.getbasetemp() / "m"
    shown = to_json(message)
    for tensor in shown["input"]:
        if "pad_value" in tensor and not isinstance(tensor["pad_value"], str):
            assert math.isfinite(tensor["pad_value"])
    draft = draft_from_json(folder, json.dumps(shown))
    expected = new_config()
    expected.CopyFrom(message)
    expected.name = message.name or "m"
    assert draft.message == expected


def test_json_is_as_tritons_clients_expect_it():
    message = new_config(name="m")
    message.input.add(name="x", data_type=13, dims=[-1, 3])
    message.dynamic_batching.max_queue_delay_microseconds = 1 << 60
    message.version_policy.specific.versions.append(3)
    message.instance_group.add()
    shown = to_json(message)
    assert shown["input"][0]["data_type"] == "TYPE_STRING"
    assert shown["input"][0]["dims"] == [-1, 3]
    assert shown["input"][0]["optional"] is False
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 1 << 60
    assert shown["version_policy"]["specific"]["versions"] == [3]
    assert shown["max_batch_size"] == 0 and shown["platform"] == "" and shown["output"] == []
    # Ours only where they are used.
    assert "finite" not in shown["input"][0] and "runs" not in shown["instance_group"][0]
    message.instance_group[0].runs = 2
    message.input[0].pad_value = 0
    assert to_json(message)["instance_group"][0]["runs"] == "RUNS_THREAD"
    assert to_json(message)["input"][0]["pad_value"] == 0
