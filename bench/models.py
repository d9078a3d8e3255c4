# SPDX-License-Identifier: Apache-2.0
"""Create the model repositories that Headrace and Triton's ONNX peer are started with.

They are made anew before each start, under .work/, which git ignores; only the files of ResNet-50 are kept. The `mlp`
configurations say the same of batches and instances.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench import mlp, resnet50
from bench.errors import BenchError
from bench.formats import SMALL, Format
from bench.formats.files import model_file
from bench.torchscript import torchscript_file
from bench.workloads import NETWORKS

BENCH = Path(__file__).parent
WORK = BENCH / ".work"
TRITON_MLP = BENCH / "peers/triton-python/mlp_model.py"
IDLE_MODELS = tuple(f"identity_{number:02}" for number in range(100))
LARGEST_BATCH = 64
ANY_SIZE = (-1,)
IMAGE = (3, 224, 224)
FIRST_NUMBERS = 1000
CLASSES = (FIRST_NUMBERS,)
FIRST_1000 = f'parameters {{ key: "first" value {{ string_value: "{FIRST_NUMBERS}" }} }}'
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


def example_repository() -> Path:
    """The repository of examples/, made if it is not there or out of date."""
    folder = WORK / "examples"
    command = [sys.executable, str(BENCH.parent / "examples/make_models.py"), str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BenchError(f"the example repository cannot be made: {finished.stderr.strip()[-800:]}")
    return folder


def predict_repository(name: str, *, joined: bool) -> Path:
    """A TorchScript network, alone, so that `/predict` needs no name; whether requests may share a batch."""
    folder = _emptied(WORK / name)
    widths, more = NETWORKS[name], (JOINED,) if joined else ()
    config = _config("pytorch", widths[:1], widths[-1:], *more, names=("INPUT__0", "OUTPUT__0"))
    _link(torchscript_file(name), _model(folder, name, config) / "model.pt")
    return folder


def triton_mlp_repository(wait_microseconds: int) -> Path:
    """The same network for Triton's Python backend, which waits this long for a batch to fill."""
    folder = _emptied(WORK / f"triton-mlp-{wait_microseconds}")
    joined = f"dynamic_batching {{ max_queue_delay_microseconds: {wait_microseconds} }}"
    version = _model(folder, "mlp", _mlp_config("python", joined))
    mlp.write_onnx(version / "model.onnx")
    shutil.copyfile(TRITON_MLP, version / "model.py")
    return folder


def triton_native_repository() -> Path:
    """The two models that every peer has too, for the backends of native.py, which have their names."""
    folder = _emptied(WORK / "triton-native")
    _model(folder, "identity", _config("identity", ANY_SIZE, ANY_SIZE, JOINED))
    _model(folder, "first1000", _config("first1000", IMAGE, CLASSES, JOINED))
    return folder


def resnet50_repository(kind: Format, instances: int) -> Path:
    """ResNet-50 in this format, alone; each request is an execution of its own."""
    folder = _emptied(WORK / f"{kind.name}-{instances}")
    _large(folder, kind, instances)
    return folder


def loading_repository(kind: Format) -> Path:
    """The large model, and one that is loaded before it, so that the framework has started."""
    folder = _emptied(WORK / f"{kind.name}-load")
    _large(folder, kind)
    size = (resnet50.SMALL_WIDTH,)
    outputs = (kind.given,) if kind.columns else size
    config = _config(kind.backend, size, outputs, names=(kind.input_name, kind.output_name))
    _link(model_file(kind, SMALL), _model(folder, SMALL, config) / kind.file)
    return folder


def _large(repository: Path, kind: Format, instances: int = 1) -> None:
    names = (kind.input_name, kind.output_name)
    config = _config(kind.backend, kind.image, (kind.given,), names=names, instances=instances)
    _link(model_file(kind, kind.large), _model(repository, kind.large, config) / kind.file)


def _link(link: Path, target: Path) -> None:
    # Hard links: 100 MB are not copied, and the page cache holds them once. Headrace follows no others out of a model.
    if link.is_dir():
        shutil.copytree(link, target, copy_function=os.link)
    else:
        os.link(link, target)


def _mlp_config(backend: str, *more: str) -> str:
    return _config(backend, mlp.WIDTHS[:1], mlp.WIDTHS[-1:], *more)


def _config(
    backend: str,
    taken: tuple[int, ...],
    given: tuple[int, ...],
    *more: str,
    names: tuple[str, str] = ("INPUT0", "OUTPUT0"),
    instances: int = 1,
) -> str:
    lines = [
        f'backend: "{backend}"',
        f"max_batch_size: {LARGEST_BATCH}",
        f'input [{{ name: "{names[0]}" data_type: TYPE_FP32 dims: {list(taken)} }}]',
        f'output [{{ name: "{names[1]}" data_type: TYPE_FP32 dims: {list(given)} }}]',
        f"instance_group [{{ kind: KIND_CPU count: {instances} }}]",
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
