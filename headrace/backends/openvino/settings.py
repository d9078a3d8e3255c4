# SPDX-License-Identifier: Apache-2.0
"""How a configuration sets OpenVINO up: its parameters become properties.

Called by `backends.openvino.backend` when it compiles a model. The names are OpenVINO's own and those of Triton's backend,
with other defaults: an instance computes with one thread, and as precisely as the model is written. Must not know what
a model looks like.

    parameters
      INFERENCE_NUM_THREADS     threads of all instances together; as many as instances unless told
      NUM_STREAMS               batches computed side by side; as many as instances unless told, AUTO or NUMA
      PERFORMANCE_HINT          LATENCY unless told; THROUGHPUT, CUMULATIVE_THROUGHPUT
      INFERENCE_PRECISION_HINT  f32 unless told. OpenVINO itself would take f16 or bf16 where the CPU is quicker with
                                them, and answer with three digits
      HINT_BF16                 Triton's: YES for INFERENCE_PRECISION_HINT bf16
      COMPILATION_NUM_THREADS, EXECUTION_MODE_HINT, PERFORMANCE_HINT_NUM_REQUESTS, ENABLE_CPU_PINNING,
      ENABLE_HYPER_THREADING, SCHEDULING_CORE_TYPE, MODEL_DISTRIBUTION_POLICY, DYNAMIC_QUANTIZATION_GROUP_SIZE,
      KV_CACHE_PRECISION, CPU_DENORMALS_OPTIMIZATION, CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE   handed over as they are
      RESHAPE_IO_LAYERS         YES: the model's inputs get the dims of the configuration
      TARGET_DEVICE             CPU, and nothing else
      SKIP_OV_DYNAMIC_BATCHSIZE  needs no saying here: a model has the batch size that it was exported with
    Refused: CPU_EXTENSION_PATH, which loads a library into the server, and ENABLE_BATCH_PADDING.
"""

from __future__ import annotations

from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

_AS_THEY_ARE = (
    "PERFORMANCE_HINT",
    "INFERENCE_PRECISION_HINT",
    "INFERENCE_NUM_THREADS",
    "NUM_STREAMS",
    "COMPILATION_NUM_THREADS",
    "EXECUTION_MODE_HINT",
    "PERFORMANCE_HINT_NUM_REQUESTS",
    "ENABLE_CPU_PINNING",
    "ENABLE_HYPER_THREADING",
    "SCHEDULING_CORE_TYPE",
    "MODEL_DISTRIBUTION_POLICY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "KV_CACHE_PRECISION",
    "CPU_DENORMALS_OPTIMIZATION",
    "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE",
)


def properties(config: ModelConfig) -> dict[str, str]:
    """What a model is compiled with."""
    parameters = config.parameters
    _refuse(config)
    instances = sum(group.count for group in config.instance_groups if not group.passive) or 1
    # One compiled model for all instances, with a stream for each: two had 1.3 times the throughput of one when each had
    # a compiled model of its own, 1.7 times with two streams of one, for half the memory (2 cores, 64 MB of weights).
    chosen = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": str(instances),
        "INFERENCE_NUM_THREADS": str(instances),
        "INFERENCE_PRECISION_HINT": "f32",
        # Pinned threads of several models, and of the server, would all sit on the first cores.
        "ENABLE_CPU_PINNING": "NO",
    }
    if is_yes(config, "HINT_BF16"):
        chosen["INFERENCE_PRECISION_HINT"] = "bf16"
    chosen.update({key: parameters[key] for key in _AS_THEY_ARE if key in parameters})
    return chosen


def is_yes(config: ModelConfig, key: str) -> bool:
    """Whether a parameter that is YES or NO says YES."""
    text = config.parameters.get(key, "NO").upper()
    if text not in ("YES", "NO"):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use YES or NO")
    return text == "YES"


def _refuse(config: ModelConfig) -> None:
    if "CPU_EXTENSION_PATH" in config.parameters:
        raise Unimplemented(
            f"model '{config.name}' has parameter CPU_EXTENSION_PATH, which would load a library into the server: export "
            "the model with OpenVINO's own operators"
        )
    if is_yes(config, "ENABLE_BATCH_PADDING"):
        raise Unimplemented(
            f"model '{config.name}' has parameter ENABLE_BATCH_PADDING: export the model with a first dimension of any "
            "size, and leave the parameter out"
        )
    device = config.parameters.get("TARGET_DEVICE", "CPU")
    if device != "CPU":
        raise Unimplemented(
            f"model '{config.name}' has parameter TARGET_DEVICE '{device[:32]}': only CPU is served, leave it out"
        )
