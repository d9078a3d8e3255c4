# SPDX-License-Identifier: Apache-2.0
"""Called by servers.py: makes the model repositories that Headrace and Triton's ONNX peer are started with.

They are made anew before each start, under .work/, which git ignores. The `mlp` configurations say the same of
batches and instances.
"""

import shutil
from pathlib import Path

from bench import mlp

BENCH = Path(__file__).parent
WORK = BENCH / ".work"
TRITON_MLP = BENCH / "peers/triton-python/mlp_model.py"
IDLE_MODELS = tuple(f"identity_{number:02}" for number in range(100))
LARGEST_BATCH = 64
ANY_SIZE = (-1,)
IMAGE, CLASSES = (3, 224, 224), (1000,)
FIRST_1000 = 'parameters { key: "first" value { string_value: "1000" } }'
# There is one core; Triton's model.py says the same to its own session.
ONE_THREAD = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
JOINED = "dynamic_batching { }"


def headrace_repository() -> Path:
    """The two models that every peer has too."""
    folder = _emptied(WORK / "headrace")
    _model(folder, "identity", _config("identity", ANY_SIZE, ANY_SIZE, JOINED))
    _model(folder, "first1000", _config("identity", IMAGE, CLASSES, JOINED, FIRST_1000))
    return folder


def one_core_repository() -> Path:
    """The network, and an identity that joins no requests: each is a batch of its own.

    Apart from the others, so that the memory of ONNX Runtime is not counted where it is not used.
    """
    folder = _emptied(WORK / "headrace-1core")
    _model(folder, "identity_one", _config("identity", (16,), (16,)))
    mlp.write_onnx(_model(folder, "mlp", _mlp_config("onnxruntime", JOINED, ONE_THREAD)) / "model.onnx")
    return folder


def idle_repository() -> Path:
    """A hundred models that nobody asks for anything."""
    folder = _emptied(WORK / "idle")
    for name in IDLE_MODELS:
        _model(folder, name, _config("identity", ANY_SIZE, ANY_SIZE, JOINED))
    return folder


def triton_mlp_repository(wait_microseconds: int) -> Path:
    """The same network for Triton's Python backend, which waits this long for a batch to fill."""
    folder = _emptied(WORK / f"triton-mlp-{wait_microseconds}")
    joined = f"dynamic_batching {{ max_queue_delay_microseconds: {wait_microseconds} }}"
    version = _model(folder, "mlp", _mlp_config("python", joined))
    mlp.write_onnx(version / "model.onnx")
    shutil.copyfile(TRITON_MLP, version / "model.py")
    return folder


def _mlp_config(backend: str, *more: str) -> str:
    return _config(backend, mlp.WIDTHS[:1], mlp.WIDTHS[-1:], *more)


def _config(backend: str, taken: tuple[int, ...], given: tuple[int, ...], *more: str) -> str:
    lines = [
        f'backend: "{backend}"',
        f"max_batch_size: {LARGEST_BATCH}",
        f'input [{{ name: "INPUT0" data_type: TYPE_FP32 dims: {list(taken)} }}]',
        f'output [{{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {list(given)} }}]',
        "instance_group [{ kind: KIND_CPU count: 1 }]",
        *more,
    ]
    return "\n".join(lines) + "\n"


def _model(repository: Path, name: str, config: str) -> Path:
    """Write a model's configuration and return the folder of its only version."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return version


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
