# SPDX-License-Identifier: Apache-2.0
"""Configurations as people have them: the first server's two examples word for word, and today's features."""

import pytest

from headrace.core.dtypes import BOOL, BYTES, FP16, FP32, INT32, UINT64
from headrace.models.config.completion import complete
from headrace.models.config.drafts import read_draft
from headrace.models.config.types import (
    BatchInput,
    BatchOutput,
    ControlInput,
    DynamicBatching,
    EnsembleScheduling,
    InitialState,
    OldestStrategy,
    Resource,
    SequenceBatching,
    WarmupInput,
)

MNIST = """name: "trt_mnist"
platform: "tensorrt_plan"
max_batch_size: 8
input [
  {
    name: "data"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 1, 28, 28 ]
  }
]
output [
  {
    name: "prob"
    data_type: TYPE_FP32
    dims: [ 10, 1, 1 ]
    label_filename: "mnist_labels.txt"
  }
]
cc_model_filenames [
  {
    key: "6.1"
    value: "model6_1.plan"
  },
  {
    key: "7.0"
    value: "model7_0.plan"
  }
]
instance_group [
  {
    count: 2
    gpus: [ 0 ]
  }
]
"""
RESNET = """name: "resnet50"
platform: "tensorflow_graphdef"
max_batch_size: 128
input [
  {
    name: "input"
    data_type: TYPE_FP32
    format: FORMAT_NHWC
    dims: [ 224, 224, 3 ]
  }
]
output [
  {
    name: "output"
    data_type: TYPE_FP32
    dims: [ 1000 ]
  }
]
instance_group [
  {
    gpus: [ 0 ]
  },
  {
    gpus: [ 1 ]
  }
]
"""


@pytest.fixture
def served(folder):
    def make(text, name, others=(), gpus=0):
        return complete(read_draft(folder(text, name=name, others=others)), None, gpus)

    return make


def test_the_first_servers_mnist(served):
    config = served(MNIST, "trt_mnist", others=("mnist_labels.txt",), gpus=1)
    assert config.backend == "tensorrt" and config.platform == "tensorrt_plan"
    assert config.cc_model_filenames == {"6.1": "model6_1.plan", "7.0": "model7_0.plan"}
    group = config.instance_groups[0]
    assert (group.name, group.kind, group.count, group.gpus) == ("trt_mnist_0", "gpu", 2, (0,))
    assert config.inputs[0].dims == (1, 28, 28) and config.outputs[0].label_filename == "mnist_labels.txt"


def test_the_first_servers_resnet(served):
    config = served(RESNET, "resnet50", gpus=2)
    assert config.default_model_filename == "model.graphdef" and config.max_batch_size == 128
    assert [(group.name, group.gpus) for group in config.instance_groups] == [
        ("resnet50_0", (0,)),
        ("resnet50_1", (1,)),
    ]


def test_resnet_in_onnx(served):
    text = """
    platform: "onnxruntime_onnx"
    max_batch_size: 32
    input [ { name: "data_0", data_type: TYPE_FP32, dims: [ 3, 224, 224 ], reshape { shape: [ 1, 3, 224, 224 ] } } ]
    output [ { name: "fc6_1", data_type: TYPE_FP32, dims: [ 1000 ], label_filename: "labels.txt" } ]
    dynamic_batching {
      preferred_batch_size: [ 8, 4, 8 ]
      max_queue_delay_microseconds: 100
      priority_levels: 3
      default_priority_level: 2
      default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 500 allow_timeout_override: true }
      priority_queue_policy { key: 1 value: { max_queue_size: 64 } }
    }
    optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator : [ {
      name : "openvino" parameters { key: "p" value: "v" } } ] } input_pinned_memory { enable: false } }
    response_cache { enable: true }
    version_policy: { all { } }
    parameters { key: "intra_op_thread_count" value: { string_value: "2" } }
    """
    config = served(text, "densenet_onnx", others=("labels.txt", "1/model.onnx"))
    assert config.backend == "onnxruntime" and config.response_cache
    assert config.inputs[0].reshape == (1, 3, 224, 224)
    batching = config.scheduling
    assert isinstance(batching, DynamicBatching)
    assert batching.preferred_batch_sizes == (4, 8) and batching.default_priority_level == 2
    assert batching.default_queue_policy.timeout_action == "delay"
    assert batching.priority_queue_policies[1].max_queue_size == 64
    assert config.parameters == {"intra_op_thread_count": "2"}
    assert config.proto.optimization.execution_accelerators.cpu_execution_accelerator[0].parameters["p"] == "v"


def test_an_ensemble(served):
    text = """
    name: "ensemble_image"
    platform: "ensemble"
    max_batch_size: 1
    input [ { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "CLASSES" data_type: TYPE_FP32 dims: [ 1000 ] } ]
    ensemble_scheduling {
      max_inflight_requests: 16
      step [
        { model_name: "classify" model_version: 3
          input_map { key: "data_0" value: "pixels" }
          output_map { key: "fc6_1" value: "CLASSES" } },
        { model_name: "preprocess"
          input_map { key: "INPUT" value: "IMAGE" }
          output_map { key: "OUTPUT" value: "pixels" } }
      ]
    }
    """
    config = served(text, "ensemble_image")
    graph = config.scheduling
    assert isinstance(graph, EnsembleScheduling) and graph.max_inflight_requests == 16
    assert [(step.model_name, step.model_version) for step in graph.steps] == [("classify", 3), ("preprocess", -1)]
    assert graph.steps[1].output_map == {"OUTPUT": "pixels"}
    assert config.backend == "ensemble" and config.instance_groups == () and config.inputs[0].dtype is BYTES


def test_a_sequence_model_with_state(served):
    text = """
    backend: "onnxruntime" max_batch_size: 8
    input { name: "INPUT" data_type: TYPE_INT32 dims: -1 }
    output { name: "OUTPUT" data_type: TYPE_INT32 dims: -1 }
    sequence_batching {
      max_sequence_idle_microseconds: 5000000
      oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 50 }
      control_input [
        { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
        { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ -1, 1 ] } ] },
        { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
        { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
      ]
      state [ {
        input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP16 dims: [ -1 ]
        initial_state { name: "zeros" data_type: TYPE_FP16 dims: [ 4 ] zero_data: true }
        use_growable_memory: true
      } ]
    }
    """
    batching = served(text, "simple_sequence").scheduling
    assert isinstance(batching, SequenceBatching)
    assert batching.strategy == OldestStrategy(4, (2, 4), 50)
    assert batching.max_sequence_idle_microseconds == 5_000_000
    assert batching.controls == (
        ControlInput("START", "start", FP32, 0, 1),
        ControlInput("READY", "ready", INT32, -1, 1),
        ControlInput("END", "end", BOOL, False, True),
        ControlInput("CORRID", "corrid", UINT64),
    )
    assert batching.states[0].initial == (InitialState("zeros", FP16, (4,), True),)
    assert batching.states[0].use_growable_memory


def test_a_sequence_model_with_all_defaults(served, tensors):
    batching = served(f'backend: "python"{tensors}sequence_batching {{ iterative_sequence: true }}', "s").scheduling
    assert isinstance(batching, SequenceBatching) and batching.iterative
    assert batching.max_sequence_idle_microseconds == 1_000_000


def test_a_decoupled_model_that_calls_others(served):
    text = """
    name: "bls_decoupled"
    backend: "python"
    input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] },
            { name: "STREAM" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
    output [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
    instance_group [ { count: 4 kind: KIND_CPU } ]
    model_transaction_policy { decoupled: True }
    parameters: { key: "EXECUTION_ENV_PATH", value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
    parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS", value: { string_value: "no" } }
    """
    config = served(text, "bls_decoupled")
    assert config.decoupled and config.inputs[1].optional and config.instance_groups[0].count == 4
    assert config.parameters["EXECUTION_ENV_PATH"].endswith("env.tar.gz")
    assert config.max_batch_size == 0 and config.scheduling is None


def test_ragged_batches(served):
    text = """
    backend: "onnxruntime" max_batch_size: 16
    input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
    output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
    batch_input [ { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32
                    source_input: "INPUT0" } ]
    batch_output [ { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" } ]
    dynamic_batching { }
    """
    config = served(text, "ragged")
    assert config.batch_inputs == (BatchInput("BATCH_ACCUMULATED_ELEMENT_COUNT", ("INDEX",), FP32, "INPUT0"),)
    assert config.batch_outputs == (BatchOutput(("OUTPUT0",), "INPUT0"),)


def test_warm_ups(served):
    text = """
    backend: "onnxruntime" max_batch_size: 4
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "b" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "c" data_type: TYPE_FP32 dims: [ 3 ] } ]
    model_warmup [ {
      name: "largest" batch_size: 4 count: 2
      inputs { key: "a" value: { data_type: TYPE_FP32 dims: [ 3 ] random_data: true } }
      inputs { key: "b" value: { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "words" } }
    } ]
    """
    warmup = served(text, "warm", others=("warmup/words",)).warmups[0]
    assert (warmup.name, warmup.batch_size, warmup.count) == ("largest", 4, 2)
    assert warmup.inputs == {
        "a": WarmupInput(FP32, (3,), "random"),
        "b": WarmupInput(BYTES, (1,), "file", "words"),
    }


def test_a_rate_limiter(served, tensors):
    text = f"""
    backend: "python" {tensors}
    instance_group [ {{ count: 2 rate_limiter {{ priority: 2 resources [
      {{ name: "R1" count: 4 }}, {{ name: "R2" global: true count: 2 }} ] }} }} ]
    """
    group = served(text, "limited").instance_groups[0]
    assert group.priority == 2
    assert group.resources == (Resource("R1", 4), Resource("R2", 2, True))


def test_our_own_texts(served):
    text = """
    backend: "onnxruntime" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] pad_value: 0 finite: true }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] padded_like: "x" }
    dynamic_batching { max_queue_delay_microseconds: auto latency_target_ms: 12.5 }
    instance_group { runs: RUNS_THREAD }
    """
    config = served(text, "own")
    assert config.inputs[0].pad_value == 0 and config.inputs[0].finite and config.outputs[0].padded_like == "x"
    assert config.scheduling == DynamicBatching(auto_delay=True, latency_target_ms=12.5)
    assert config.instance_groups[0].runs == "thread"
