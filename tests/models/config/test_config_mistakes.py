# SPDX-License-Identifier: Apache-2.0
"""What people get wrong in the three syntaxes: the right line, and what to write instead."""

import pytest

from headrace.models.config.drafts import draft_from_json, read_draft
from headrace.models.config.problems import ConfigError, Problem

TEXT = [
    (
        'input [\n  {\n    name: "x"\n\n\n\n    datatype: 11\n  }\n]',
        7,
        "input: 'datatype' is not a field here; did you mean 'data_type'?",
    ),
    (
        "input {\n data_type: TYPE_FLOAT32 }",
        2,
        "input.data_type: TYPE_FLOAT32 is not a data type; did you mean TYPE_FP32?",
    ),
    ("input {\n data_type: FP32 }", 2, "input.data_type: FP32 is not a data type; did you mean TYPE_FP32?"),
    ('input {\n data_type: "TYPE_FP32" }', 2, "write TYPE_FP32 without quotes"),
    ("input { data_type: TYPE_BYTES }", 1, "did you mean TYPE_STRING?"),
    ("input { data_type: 99 }", 1, "99 is not a data type; write one of TYPE_BOOL"),
    ("\nname: resnet50", 2, 'name: write "resnet50" in quotes'),
    ("output { label_filename: labels/a-b.txt }", 1, 'write "labels/a-b.txt" in quotes'),
    ('input {\n dims: "3" }', 2, "write dims: [ 3 ] without quotes"),
    ('input { dims: "[3, 224, 224]" }', 1, "write dims: [ 3, 224, 224 ] without quotes"),
    ("input { dims: [ 3,\n 224,\n ] }", 3, "the list of 'dims' has a comma before its ']'; remove that comma"),
    ("input { dims: 3, 224 }", 1, "several values go into [ ]"),
    ("input { dims: (3, 224) }", 1, "write dims: [ ... ]"),
    ("input { dims: [[3]] }", 1, "write all values in one [ ]"),
    ("input { dims: 3.5 }", 1, "takes a whole number, not '3.5'"),
    ('input [\n {\n  name: "x"\n]', 4, "']' comes before the '{' of line 2 is closed; add '}'"),
    ('\ninput [\n {\n  name: "x"\n }\noutput [ ]', 6, "',' or ']' is missing before 'output', in the list of line 2"),
    ('name: "m"\ninput {\n name: "x"', 2, "'{' is never closed; add '}'"),
    ('name: "m"\n}', 2, "'}' closes nothing"),
    ('name: "m"\n\nplatform: "onnx', 3, 'the quote " is not closed in this line'),
    ('name "m"', 1, "after 'name' a ':' is missing"),
    ("name:\nmax_batch_size: 3", 1, "after 'name:' the value is missing"),
    ("name: http://a", 1, "a text with ':' in it needs quotes"),
    ('name: "m"\nmax_batch_size:', 2, "after 'max_batch_size:' the value is missing"),
    ("input {\n dims [ 3, 4 ] }", 2, "after 'dims' a ':' is missing"),
    ('name = "m"', 1, "write 'name:' instead of 'name ='"),
    ('{ "name": "m" }', 1, "'{' stands where a field's name should"),
    ('"name": "m"', 1, "names have no quotes"),
    ('name: "m"\n// a comment', 2, "comments begin with '#'"),
    ('name: "m",,', 1, "there is a comma too many here"),
    ('inputs { name: "x" }', 1, "'inputs' is not a field here; did you mean 'input'?"),
    ("preferred_batch_size: [ 4 ]", 1, "it belongs into 'dynamic_batching'"),
    ("input { max_batch_size: 4 }", 1, "it belongs at the top, outside of this block"),
    ("zzz: 1", 1, "'zzz' is not a field here; fields here are name, platform"),
    ("max_batch_size: 1\nmax_batch_size: 2", 2, "'max_batch_size' is written twice, first in line 1"),
    ("dynamic_batching { }\nsequence_batching { }", 2, "'sequence_batching' excludes 'dynamic_batching' of line 1"),
    ("max_batch_size: 9999999999", 1, "max_batch_size: takes numbers from"),
    ("model_warmup { batch_size: -1 }", 1, "takes no negative numbers"),
    ("instance_group [ { kind: GPU } ]", 1, "GPU is not a kind; did you mean KIND_GPU?"),
    ('response_cache { enable: "true" }', 1, "write enable: true, without quotes"),
    ("response_cache { enable: yes }", 1, "write enable: true or false"),
    ("response_cache: true", 1, "response_cache: takes a block: write response_cache { ... }"),
    ("name: { }", 1, "takes a single value, not a block"),
    ('name: [ "m" ]', 1, "takes one value, not a list"),
    ('parameters { key: "a" value: "b" }', 1, 'write value { string_value: "b" }'),
    ('input { pad_value: "0" }', 1, "takes a number without quotes"),
    ("sequence_batching { direct { max_queue_delay_microseconds: auto } }", 1, "takes a whole number, not 'auto'"),
    ('name: "\\xff"', 1, "protobuf cannot read this"),
    (b'name: "m"\nplatform: "\xff"', 2, "is not UTF-8 text here; save the file as UTF-8"),
]

JSON = [
    ('{\n "name": "m",\n}', 3, "there is a comma before '}'; remove it"),
    ('{\n "name": "m"\n "backend": "python"}', 3, "',' or '}' is missing before \"backend\""),
    ("{\n 'name': 'm'}", 2, "double quotes"),
    ('{"name": "m",\n# no\n}', 2, "JSON has no comments"),
    ('{\n"name": m}', 2, 'write "m" in double quotes'),
    ('{\nname: "m"}', 2, "name stands where a name in double quotes should"),
    ('{"name" "m"}', 1, "a ':' is missing"),
    ('{"name": }', 1, "a value is missing"),
    ('{"input": [\n{"name": "x"}', 1, "'[' is never closed; add ']'"),
    ('{\n"input": [{}]', 1, "'{' is never closed; add '}'"),
    ("{}\n{}", 2, "comes after the end of the object"),
    ("[]", 1, "begin with '{'"),
    ('{"name": "a\nb"}', 1, "not closed in its line"),
    ('{"name": "\\ud800"}', 1, "surrogate"),
    ('{"name": "m",\n"name": "m"}', 2, "'name' is written twice"),
    ('{"input": {"name": "x"}}', 1, 'takes a list: write "input": [ { ... } ]'),
    ('{"input": [{"dims": [\n"x"]}]}', 2, "takes a whole number, not the text 'x'"),
    ('{"maxBatchSise": 3}', 1, "did you mean 'max_batch_size'?"),
    ('{"parameters": {"a": "b"}}', 1, 'write "a": { "string_value": "b" }'),
    ('{"dynamic_batching": {"priority_queue_policy": {"x": {}}}}', 1, "'x' cannot stand here"),
    ('{"max_batch_size": 01}', 1, "cannot stand here"),
    ('{"sequence_batching": {"direct": {"minimum_slot_utilization": 1e300}}}', None, "number out of range"),
]

YAML = [
    ("name: m\n\tbackend: x", 2, "there is a tab; indent with spaces"),
    ("name: m\nbackend: a: b", 2, "a ':' too many"),
    ("name: 'm\n", None, "a quote is not closed"),
    ("- a", 1, "a configuration is a mapping"),
    ("a: &x 1\nb: *x", 2, "aliases (*x) are not supported here"),
    ("name: m\n---\nname: n", 2, "a second document begins here"),
    ("name: m\ninput:\n  - name: x\n    dims: [a]", 4, "input.dims: takes a whole number, not the text 'a'"),
    ("name: m\ninput:\n  - name: x\n    data_type: float32", 4, "did you mean TYPE_FP32?"),
    ("name: m\ndynamic_batching:\n", 2, "write dynamic_batching: {} for all defaults"),
    ("name: 5", 1, 'name: write "5" in quotes'),
    ("max_batch_size: 1" + "0" * 5000, 1, "takes a whole number"),
    ("? [a]\n: b", 1, "a name is missing"),
    ("parameters: [1]", 1, "takes names with values"),
]


def check(folder, line, text):
    with pytest.raises(ConfigError) as caught:
        read_draft(folder)
    problem = caught.value.problems[0]
    assert text in f"{problem.field}: {problem.text}"
    if line is not None:
        assert problem.line == line


@pytest.mark.parametrize(("written", "line", "text"), TEXT)
def test_text(folder, written, line, text):
    check(folder(written), line, text)


@pytest.mark.parametrize(("written", "line", "text"), JSON)
def test_json(folder, written, line, text):
    check(folder(written, file="config.json"), line, text)


@pytest.mark.parametrize(("written", "line", "text"), YAML)
def test_yaml(folder, written, line, text):
    check(folder(written, file="config.yaml"), line, text)


def test_all_wrong_fields_are_reported_together(folder):
    with pytest.raises(ConfigError) as caught:
        read_draft(folder('nam: "m"\nplatfrm: "x"\nmax_batch_size: many'))
    assert [problem.line for problem in caught.value.problems] == [1, 2, 3]
    assert caught.value.message == (
        "m/config.pbtxt:1: 'nam' is not a field here; did you mean 'name'? "
        "(and 2 more; 'headrace models check' lists all)"
    )


def test_two_configurations_in_one_folder(folder):
    folder('name: "m"')
    with pytest.raises(ConfigError, match=r"config\.pbtxt and config\.json are both there; keep one"):
        read_draft(folder("{}", file="config.json"))


def test_a_request_is_named_as_the_place(tmp_path):
    with pytest.raises(ConfigError, match=r"m/config of the request:1: 'nam' is not a field here"):
        draft_from_json(tmp_path / "m", '{"nam": 1}')


def test_a_problem_prints_as_one_line():
    assert str(Problem("m/config.pbtxt", 7, "input", "a\nb\x1b")) == "m/config.pbtxt:7: input: a\\nb\\x1b"
    assert str(Problem("m/config.pbtxt", None, "", "no")) == "m/config.pbtxt: no"
