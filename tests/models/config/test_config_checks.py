# SPDX-License-Identifier: Apache-2.0
"""Each check, once: what is wrong with an otherwise right configuration, and in which line that is said."""

import pytest

from headrace.models.config.completion import complete
from headrace.models.config.drafts import read_draft
from headrace.models.config.problems import ConfigError

BASE = 'backend: "python" max_batch_size: 8 '
X, Y = 'input { name: "x" data_type: TYPE_FP32', 'output { name: "y" data_type: TYPE_FP32'
STATE = 'state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: 1 '
WARM = 'model_warmup { name: "w" inputs { key: "x" value { '
DYNAMIC = "max_batch_size: 8 dynamic_batching { "
OUT = 'output { name: "y" data_type: TYPE_FP32 dims: 4 } '
IN = 'input { name: "x" data_type: TYPE_FP32 dims: 4 } '

TENSORS = [
    (f"{OUT}\ninput {{ data_type: TYPE_FP32 dims: 4 }}", "pbtxt:2: input: model input must specify 'name'"),
    (f'{OUT}\ninput {{ name: "x" dims: 4 }}', "pbtxt:2: input: input 'x' must specify 'data_type'"),
    (f'{OUT}\ninput {{ name: "x" data_type: TYPE_FP32 }}', "pbtxt:2: input: input 'x' must specify 'dims'"),
    (f"{IN}\n{Y} dims: [ 1,\n0 ] }}", "pbtxt:2: output.dims: output 'y': dimension must be integer >= 1, or -1"),
    (f"{IN}\n{Y} dims: -2 }}", "and -2 is not"),
    (f"{IN}{OUT}\n{IN}", "pbtxt:2: input.name: input 'x' is there twice"),
    (f"{IN}{OUT}\n{OUT}", "pbtxt:2: output.name: output 'y' is there twice"),
    (
        f"{OUT}{X} dims: [ 2, 3 ]\nreshape {{ shape: [ 5 ] }} }}",
        "pbtxt:2: input.reshape: input 'x' has 6 elements in dims and 5 in reshape",
    ),
    (f"{OUT}{X} dims: [ -1, 3 ] reshape {{ shape: [ -1, -1 ] }} }}", "1 variable sizes in dims and 2 in reshape"),
    (
        f"{OUT}{X} dims: [ 2, -1, 3 ] reshape {{ shape: [ 3, -1, 2 ] }} }}",
        "[2, 3] elements between variable sizes in dims and [3, 2] in reshape",
    ),
    (f"{OUT}{X} dims: 4 reshape {{ shape: 0 }} }}", "and 0 is not"),
    (
        f"{OUT}{X} dims: [ 4, 4 ]\nformat: FORMAT_NHWC }}",
        "pbtxt:2: input.format: input 'x' has a format, which needs 3 dims, not 2",
    ),
    (
        f"{OUT}{X} dims: -1\nallow_ragged_batch: true }}",
        "pbtxt:2: input.allow_ragged_batch: input 'x' allows ragged batches",
    ),
    (
        f'{OUT}input {{ name: "x" data_type: TYPE_INT32 dims: 4 finite: true }}',
        "input.finite: input 'x' has whole numbers or text",
    ),
    (f"{OUT}{X} dims: 4\npad_value: 0 }}", "pbtxt:2: input.pad_value: input 'x' has no variable size to pad"),
    (f'{OUT}input {{ name: "x" data_type: TYPE_STRING dims: -1 pad_value: 0 }}', "a number cannot pad"),
    (f"dynamic_batching {{}} {OUT}{X} dims: -1 pad_value: 0 allow_ragged_batch: true }}", "either padded or ragged"),
    (f'{IN}{Y} dims: -1\npadded_like: "x" }}', "pbtxt:2: output.padded_like: 'x' is not an input with pad_value"),
    (
        f'{IN}{OUT}batch_input {{ kind: BATCH_ITEM_SHAPE target_name: "n" data_type: TYPE_INT32\nsource_input: "q" }}',
        "pbtxt:2: batch_input.source_input: 'q' is not an input",
    ),
    (f'{IN}{OUT}batch_input {{ target_name: "n" data_type: TYPE_INT64 source_input: "x" }}', "TYPE_INT32 or TYPE_FP32"),
    (f'{IN}{OUT}batch_input {{ target_name: "n" data_type: TYPE_FP32 }}', "needs exactly one source_input, and has 0"),
    (f'{IN}{OUT}batch_input {{ data_type: TYPE_FP32 source_input: "x" }}', "has no target_name"),
    (
        f'{IN}{OUT}batch_input {{ target_name: "x" data_type: TYPE_FP32 source_input: "x" }}',
        "'x' is an input of requests already",
    ),
    (f'{IN}{OUT}batch_output {{ target_name: "q" source_input: "x" }}', "'q' is not an output of the model"),
]

REST = [
    ("\nmax_batch_size: -1", "pbtxt:2: max_batch_size: -1 is negative"),
    ("version_policy { latest {\nnum_versions: 0 } }", "num_versions is 0"),
    ("version_policy { specific { } }", "lists no versions"),
    (
        "version_policy { specific {\nversions: [ 1, -3 ] } }",
        "pbtxt:2: version_policy.specific.versions: -3 is negative",
    ),
    ('default_model_filename: "../model.py"', "'../model.py' is outside of the version folder"),
    ('default_model_filename: "/etc/passwd"', "'/etc/passwd' is outside of the version folder"),
    ('cc_model_filenames {\nkey: "6.1" value: "a/../../b" }', "cc_model_filenames.6.1: 'a/../../b' is outside"),
    (
        "response_cache { enable: true } model_transaction_policy { decoupled: true }",
        "a decoupled model's responses cannot be cached",
    ),
    (
        'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: [ 2, 1 ] } } }',
        "are not in ascending order",
    ),
    ("model_metrics { metric_control { } }", "names no metric"),
    # Groups.
    (
        "instance_group [ {\nkind: KIND_GPU } ]",
        "pbtxt:2: instance_group.kind: instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ),
    (
        "instance_group [ { kind: KIND_CPU\ngpus: 0 } ]",
        "pbtxt:2: instance_group.gpus: instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    ("instance_group [ { gpus: 0 } ]", "specifies one or more GPUs (0 are available)"),
    ("instance_group [ { kind: KIND_MODEL gpus: 0 } ]", "has kind KIND_MODEL but specifies"),
    ("instance_group [ { count: -1 } ]", "has count -1"),
    ('instance_group [ { name: "g" }, { name: "g" } ]', "has the name of another group"),
    ("instance_group { rate_limiter { resources { count: 1 } } }", "has a resource without 'name'"),
    ('instance_group { rate_limiter { resources { name: "r" } } }', "needs 0 of the resource 'r'"),
    (
        'instance_group { rate_limiter { resources [ { name: "r" count: 1 }, { name: "r" count: 1 } ] } }',
        "the resource 'r' twice",
    ),
    # Dynamic batching.
    (
        DYNAMIC + "\npreferred_batch_size: [ 4, 16 ] }",
        "pbtxt:2: dynamic_batching.preferred_batch_size: preferred batch size 16 is larger than max_batch_size, 8",
    ),
    (DYNAMIC + "preferred_batch_size: 0 }", "preferred batch size 0 is not positive"),
    ("dynamic_batching { }", "batching is on but max_batch_size is 0"),
    (DYNAMIC + "default_priority_level: 1 }", "there are no priorities; add priority_levels"),
    (
        DYNAMIC + "priority_queue_policy { key: 1 value { } } }",
        "dynamic_batching.priority_queue_policy: there are no priorities",
    ),
    (DYNAMIC + "priority_levels: 2 }", "default_priority_level must be in range [1, 2], not 0"),
    (
        DYNAMIC + "priority_levels: 2 default_priority_level: 1\npriority_queue_policy { key: 3 value { } } }",
        "pbtxt:2: dynamic_batching.priority_queue_policy.3: there is no priority 3",
    ),
    (DYNAMIC + "priority_levels: 2 default_priority_level: 1 preserve_ordering: true }", "only one priority level"),
    (
        DYNAMIC + "\nmax_queue_delay_microseconds: auto }",
        "pbtxt:2: dynamic_batching.max_queue_delay_auto: a delay chosen by itself needs",
    ),
    (DYNAMIC + "max_queue_delay_microseconds: auto latency_target_ms: -1 }", "needs to know what it may cost"),
    (DYNAMIC + "latency_target_ms: 5 }", "only counts with max_queue_delay_microseconds: auto"),
    (
        DYNAMIC + "max_queue_delay_auto: true max_queue_delay_microseconds: 5 latency_target_ms: 5 }",
        "as a number and as auto",
    ),
    # Warm-ups.
    ('model_warmup { name: "w" batch_size: 1 }', "warm-up 'w' must give every input, and 'x' is missing"),
    (
        WARM.replace("inputs", "batch_size: 3 inputs") + "data_type: TYPE_FP32 dims: 4 zero_data: true } } }",
        "has more than the model takes, 1",
    ),
    (
        'model_warmup { batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }',
        "warm-up 0 needs 'name'",
    ),
    (
        WARM
        + 'data_type: TYPE_FP32 dims: 4 zero_data: true } }\ninputs { key: "q" value { data_type: 11 zero_data: true } } }',
        "pbtxt:2: model_warmup.inputs.q: 'q' is not an input",
    ),
    (WARM + "data_type: TYPE_FP32 dims: 4 } } }", "needs zero_data: true, random_data: true or input_data_file"),
    (WARM + "dims: 4 zero_data: true } } }", "must specify 'data_type'"),
    (WARM + "data_type: TYPE_FP32 dims: -1 zero_data: true } } }", "dimension must be integer >= 1, and -1 is not"),
    (WARM + 'data_type: TYPE_FP32 dims: 4 input_data_file: "raw" } } }', "'raw' is not a file in warmup/"),
]

CORRID = 'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID'
START = 'control_input { name: "s" control { kind: CONTROL_SEQUENCE_START'
SEQUENCE = [
    ("direct { minimum_slot_utilization: 1.5 }", "1.5 is not a share"),
    ("oldest { }", "add max_candidate_sequences"),
    ("oldest { max_candidate_sequences: 4 preferred_batch_size: 16 }", "larger than max_batch_size, 8"),
    (f"{START} int32_false_true: [ 0, 1, 2 ] }} }}", "needs exactly two values, like [ 0, 1 ], not 3"),
    (f"{START} }} }}", "control 's' needs one of int32_false_true"),
    (f"{START} int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ] }} }}", "control 's' needs one of"),
    (f"{START} int32_false_true: [ 0, 1 ] data_type: TYPE_INT32 }} }}", "remove data_type"),
    (
        f'{START} int32_false_true: [ 0, 1 ] }} }}\ncontrol_input {{ name: "t" control {{ bool_false_true: [ f, t ] }} }}',
        "pbtxt:2: sequence_batching.control_input.control.kind: CONTROL_SEQUENCE_START is sent by 's' already",
    ),
    (
        f"{START} int32_false_true: [ 0, 1 ] }} }} {START.replace('START', 'END')} int32_false_true: [ 0, 1 ] }} }}",
        "'s' is a control input twice",
    ),
    ("control_input { control { int32_false_true: [ 0, 1 ] } }", "a control input needs 'name'"),
    ('control_input { name: "s" }', "needs exactly one control, and has 0"),
    (f"{CORRID} }} }}", "control 'c' needs data_type: TYPE_UINT64"),
    (f"{CORRID} data_type: TYPE_FP32 }} }}", "control 'c' needs data_type"),
    (f"{CORRID} data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ] }} }}", "which has no false or true"),
    ('state { output_name: "o" data_type: TYPE_FP32 dims: 1 }', "a state needs 'input_name' and 'output_name'"),
    ('state { input_name: "i" output_name: "o" dims: 1 }', "state 'i' must specify 'data_type'"),
    ('state { input_name: "i" output_name: "o" data_type: TYPE_FP32 }', "state 'i' must specify 'dims'"),
    (
        'state { input_name: "x" output_name: "o" data_type: TYPE_FP32 dims: 1 }',
        "has the name of another input or state",
    ),
    (
        STATE + "} " + STATE.replace('"i"', '"j"') + "}",
        "has the output of another state",
    ),
    (STATE + 'initial_state { name: "n" data_type: TYPE_FP32 dims: 1 } }', "needs zero_data: true or data_file"),
    (
        STATE + 'initial_state { name: "n" data_type: TYPE_INT8 dims: 1 zero_data: true } }',
        "must specify the data_type of the state",
    ),
    (STATE + "initial_state { data_type: TYPE_FP32 dims: 1 zero_data: true } }", "needs 'name'"),
    (
        STATE.replace("1", "-1") + 'initial_state { name: "n" data_type: TYPE_FP32 zero_data: true } }',
        "its initial state must specify 'dims'",
    ),
    (
        STATE
        + 'initial_state [ { name: "n" data_type: 11 zero_data: t }, { name: "p" data_type: 11 zero_data: t } ] }',
        "remove one initial_state",
    ),
    (
        STATE + 'initial_state { name: "n" data_type: TYPE_FP32 dims: 1 data_file: "../../f" } }',
        "outside of initial_state/",
    ),
]


def step(name, inputs, outputs):
    maps = [f'input_map {{ key: "I{n}" value: "{name}" }} ' for n, name in enumerate(inputs)]
    maps += [f'output_map {{ key: "O{n}" value: "{name}" }} ' for n, name in enumerate(outputs)]
    return f'step {{ model_name: "{name}" {"".join(maps)}}}\n'


ENSEMBLE = [
    ("", "must specify 'step' for ensemble 'm'"),
    (step("a", ["x"], ["y"]).replace('model_name: "a"', ""), "must specify 'model_name' in step 0"),
    (step("a", [], ["y"]), "must specify 'input_map' in step 0"),
    (step("a", ["x"], []), "must specify 'output_map' in step 0"),
    (step("m", ["x"], ["y"]), "step 0 is the ensemble itself"),
    (step("a", ["x"], ["y"]) + step("b", ["x"], ["y"]), "ensemble tensor 'y' is written in step 0 already"),
    (step("a", ["x"], ["x", "y"]), "'x' is an input of the ensemble and cannot be written"),
    (step("a", ["x", "q"], ["y"]), "'q' is read in step 0, but nothing writes it"),
    (step("a", ["q"], ["y"]), "ensemble input 'x' for ensemble 'm' is not used"),
    (step("a", ["x"], ["q"]), "ensemble output 'y' for ensemble 'm' is written by no step"),
    (step("a", ["x", "q"], ["p"]) + step("b", ["p"], ["q", "y"]), "the steps 0, 1 wait for each other in a circle"),
    (step("a", ["x", "p"], ["p", "y"]), "the steps 0 wait for each other"),
    (step("a", ["x"], ["y"]).replace('model_name: "a"', 'model_name: "a" model_version: -2'), "-2 is not a version"),
    (step("a", ["x", ""], ["y"]), "maps a name to nothing"),
]


def find(found, expected):
    assert any(expected in item for item in found), found


@pytest.mark.parametrize(("text", "expected"), TENSORS)
def test_tensors(problems, text, expected):
    find(problems(BASE + text), expected)


@pytest.mark.parametrize(("text", "expected"), REST)
def test_the_rest(problems, text, expected):
    find(problems(f'backend: "python" {IN}{OUT}{text}'), expected)


@pytest.mark.parametrize(("text", "expected"), SEQUENCE)
def test_sequences(problems, text, expected):
    find(problems(f"{BASE}{IN}{OUT}sequence_batching {{ {text} }}"), expected)


@pytest.mark.parametrize(("text", "expected"), ENSEMBLE)
def test_ensembles(problems, text, expected):
    find(problems(f'platform: "ensemble" {IN}{OUT}ensemble_scheduling {{ {text} }}'), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("instance_group { }", "an ensemble has no instance_group"),
        ('model_warmup { name: "w" }', "an ensemble has no model_warmup"),
        ('backend: "python"', "an ensemble has no backend of its own"),
    ],
)
def test_an_ensemble_computes_nothing_itself(problems, text, expected):
    find(problems(f"{IN}{OUT}ensemble_scheduling {{ {step('a', ['x'], ['y'])} }} {text}"), expected)


def test_an_ensemble_needs_its_steps(problems):
    find(problems(f'platform: "ensemble" {IN}{OUT}dynamic_batching {{ }}'), "must specify 'ensemble_scheduling'")
    find(problems(f'platform: "ensemble" {IN}{OUT}dynamic_batching {{ }}'), "an ensemble does not batch itself")


def test_names(problems):
    (found,) = problems(f'{BASE}{IN}{OUT}\nname: "other"')
    assert found.startswith(
        "pbtxt:2: name: unexpected directory name 'm' for model 'other', directory name must equal model name"
    )
    find(problems(f"{BASE}{IN}{OUT}", name="-m"), "'-m' cannot name a model")


def test_fields_that_cannot_be_derived(problems):
    (backend,) = problems("")
    assert backend.startswith("pbtxt: backend: no backend is given for model 'm'; add backend: ")


def test_label_files(problems):
    text = f'{BASE}{IN}{Y} dims: 4 label_filename: "%s" }}'
    find(problems(text % "l.txt"), "output.label_filename: 'l.txt' is not a file in the model's folder")
    find(problems(text % "../l.txt"), "'../l.txt' is outside of the model's folder")
    find(problems(text % ("l" * 3000)), "is not a file in the model's folder")
    assert problems(text % "l.txt", others=("l.txt",)) == []


def test_gpus(problems):
    text = f"{BASE}{IN}{OUT}instance_group {{ kind: KIND_GPU gpus: [ 0, 2 ] }}"
    find(problems(text, gpus=2), "specifies GPU 2; available are 0 to 1")
    assert problems(text, gpus=3) == []


def test_an_empty_reshape_needs_a_batch(problems):
    text = f"{OUT}{X} dims: 1 reshape {{ }} }}"
    assert problems(BASE + text) == []
    find(problems(f'backend: "python" {text}'), "an empty reshape, which needs a model that batches")


def test_padding_needs_a_batch(problems):
    text = f"{OUT}{X} dims: -1 pad_value: 0 }}"
    assert problems(BASE + text) == []
    find(problems(f'backend: "python" {text}'), "padding is for batches")


def test_queue_policies_need_no_batches(problems):
    assert (
        problems(f'backend: "python" {IN}{OUT}dynamic_batching {{ default_queue_policy {{ max_queue_size: 8 }} }}')
        == []
    )


def test_all_problems_are_reported_together(folder):
    draft = read_draft(folder('backend: "python"\nmax_batch_size: -1\ninput { dims: 0 }'))
    with pytest.raises(ConfigError) as caught:
        complete(draft, None)
    assert [(problem.line, problem.field) for problem in caught.value.problems] == [
        (2, "max_batch_size"),
        (3, "input"),
        (3, "input"),
        (3, "input.dims"),
        (None, "output"),
    ]
    assert caught.value.message.endswith("(and 4 more; 'headrace models check' lists all)")
