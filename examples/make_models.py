# SPDX-License-Identifier: Apache-2.0
"""Make the example repository: `python examples/make_models.py [FOLDER]`, default: build/models.

What people write by hand (configurations, Python models, labels) is in examples/models and is copied; what comes from a
framework (the ONNX files) is made here. The folder appears whole or not at all, and is made again only when something in
examples/ has changed. Other programs may call `make` and the functions that make graphs.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

SOURCES = Path(__file__).resolve().parent
HANDWRITTEN = SOURCES / "models"
DEFAULT_FOLDER = SOURCES.parent / "build" / "models"
STAMP = ".made-by-make_models"

# Old enough for every ONNX Runtime from 1.14 on.
OPSET, IR_VERSION = 17, 8
MLP_WIDTHS = (16, 256, 256, 16)
SEED = 2026
LEAST_ACCURACY = 0.95
IDENTITY_TYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16"),
    "BYTES",
)
IDENTITY_CONFIG = """\
# Gives back what it gets, of type {protocol_name}. No file: the identity backend computes nothing.
name: "{name}"
backend: "identity"
max_batch_size: 64

# -1: any size, which may differ from request to request.
input [ {{ name: "INPUT0" data_type: {config_name} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: {config_name} dims: [ -1 ] }} ]
"""

Numbers = npt.NDArray[Any]
Say = Callable[[str], None]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the example model repository.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="default: build/models")
    parser.add_argument("--force", action="store_true", help="make it again even if nothing has changed")
    arguments = parser.parse_args()
    try:
        make(arguments.folder, force=arguments.force, say=lambda line: print(line, flush=True))
    except FileExistsError as error:
        print(f"make_models: {error}", file=sys.stderr)
        return 1
    return 0


def _silent(line: str) -> None:
    """For callers that want no progress lines."""


def make(folder: Path, *, force: bool = False, say: Say = _silent) -> Path:
    """Make the repository, unless it is there and up to date. Returns its folder."""
    folder = folder.resolve()
    fingerprint = _fingerprint()
    stamp = folder / STAMP
    if stamp.is_file():
        if not force and stamp.read_text() == fingerprint:
            say(f"{folder} is up to date (--force makes it again)")
            return folder
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} has something else in it: name another folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that moving it there is one step of one file system.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        made = Path(work, "new")
        _fill(made, say)
        Path(made, STAMP).write_text(fingerprint)
        if folder.exists():
            folder.rename(Path(work, "old"))
        made.rename(folder)
    say(f"{folder} is ready: {sum(1 for entry in folder.iterdir() if entry.is_dir())} models")
    return folder


def _fill(repository: Path, say: Say) -> None:
    shutil.copytree(HANDWRITTEN, repository, ignore=shutil.ignore_patterns("__pycache__"))
    for name in sorted(path.name for path in HANDWRITTEN.iterdir()):
        (repository / name / "1").mkdir(exist_ok=True)
    say("identity_*: one for each data type")
    for protocol_name in IDENTITY_TYPES:
        name = f"identity_{protocol_name.lower()}"
        config_name = "TYPE_STRING" if protocol_name == "BYTES" else f"TYPE_{protocol_name}"
        (repository / name / "1").mkdir(parents=True)
        config = IDENTITY_CONFIG.format(name=name, protocol_name=protocol_name, config_name=config_name)
        (repository / name / "config.pbtxt").write_text(config)
    for name, graph in (("simple", simple_graph), ("accumulator", accumulator_graph), ("mlp", mlp_graph)):
        say(f"{name}: writing its graph")
        save(graph(), repository / name / "1" / "model.onnx")
    say("digits: training on scikit-learn's handwritten digits")
    started = time.monotonic()
    model, accuracy = digits_graph()
    if accuracy < LEAST_ACCURACY:
        raise RuntimeError(f"digits recognises only {accuracy:.1%} of the digits it has not seen")
    say(f"digits: {accuracy:.1%} of digits it has not seen are recognised ({time.monotonic() - started:.1f} s)")
    save(model, repository / "digits" / "1" / "model.onnx")


def save(model: ModelProto, file: Path) -> None:
    """Check a model and write it."""
    checker.check_model(model, full_check=True)
    file.write_bytes(model.SerializeToString())


def simple_graph() -> ModelProto:
    """Sum and difference of two rows."""
    row = ("batch", 16)
    return _model(
        "simple",
        [_node("Add", "INPUT0", "INPUT1", to="OUTPUT0"), _node("Sub", "INPUT0", "INPUT1", to="OUTPUT1")],
        [_value("INPUT0", TensorProto.INT32, row), _value("INPUT1", TensorProto.INT32, row)],
        [_value("OUTPUT0", TensorProto.INT32, row), _value("OUTPUT1", TensorProto.INT32, row)],
    )


def accumulator_graph() -> ModelProto:
    """A running sum: the state is left aside where START is 1."""
    row = ("batch", 1)
    nodes = [
        helper.make_node("Cast", ["START"], ["begins"], to=TensorProto.BOOL),
        # Chosen, not multiplied by 0: whatever the state is before a sequence, NaN included, it is left aside.
        _node("Where", "begins", "nothing", "STATE_IN", to="so_far"),
        _node("Add", "so_far", "INPUT", to="OUTPUT"),
        _node("Identity", "OUTPUT", to="STATE_OUT"),
    ]
    return _model(
        "accumulator",
        nodes,
        [
            _value("INPUT", TensorProto.FLOAT, row),
            _value("START", TensorProto.INT32, row),
            _value("STATE_IN", TensorProto.FLOAT, row),
        ],
        [_value("OUTPUT", TensorProto.FLOAT, row), _value("STATE_OUT", TensorProto.FLOAT, row)],
        {"nothing": np.zeros((1, 1), np.float32)},
    )


def mlp_graph() -> ModelProto:
    """Two hidden layers with weights that are random, and the same every time."""
    random = np.random.default_rng(SEED)
    layers = [
        (
            (random.standard_normal((rows, columns)) * np.sqrt(2 / rows)).astype(np.float32),
            (random.standard_normal(columns) * 0.1).astype(np.float32),
        )
        for rows, columns in pairwise(MLP_WIDTHS)
    ]
    return _layers("mlp", "INPUT0", "OUTPUT0", layers)


def digits_data() -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Images and digits to learn from, then images and digits to be asked about. Comes with scikit-learn."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    learn, ask, learn_digits, ask_digits = train_test_split(
        images.astype(np.float32), digits, test_size=0.25, random_state=SEED, stratify=digits
    )
    return learn, learn_digits, ask, ask_digits


def digits_graph() -> tuple[ModelProto, float]:
    """Train a classifier; its graph, and how many of the digits it has not seen it recognises, from 0 to 1."""
    # Here, because importing scikit-learn takes a second that the other graphs do not need.
    from sklearn.neural_network import MLPClassifier
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    learn, learn_digits, ask, ask_digits = digits_data()
    scaler = StandardScaler().fit(learn)
    classifier = MLPClassifier(
        hidden_layer_sizes=(128,), learning_rate_init=0.005, alpha=0.01, tol=0.003, max_iter=300, random_state=SEED
    )
    # With one thread: two are no quicker on layers this small, and three times slower while others keep the cores busy.
    with threadpool_limits(1):
        classifier.fit(scaler.transform(learn), learn_digits)
    accuracy = float(classifier.score(scaler.transform(ask), ask_digits))
    matrices = list(classifier.coefs_)
    biases = list(classifier.intercepts_)
    # The scaler becomes part of the first layer: ((x - mean) / scale) @ W + b = x @ (W / scale) + (b - mean / scale @ W).
    biases[0] = biases[0] - (scaler.mean_ / scaler.scale_) @ matrices[0]
    matrices[0] = matrices[0] / scaler.scale_[:, np.newaxis]
    layers = [
        (matrix.astype(np.float32), bias.astype(np.float32)) for matrix, bias in zip(matrices, biases, strict=True)
    ]
    return _layers("digits", "PIXELS", "PROBABILITIES", layers, softmax=True), accuracy


def _layers(
    name: str, taken: str, given: str, layers: Sequence[tuple[Numbers, Numbers]], *, softmax: bool = False
) -> ModelProto:
    """A network of dense layers with ReLU between them."""
    nodes: list[NodeProto] = []
    constants: dict[str, Numbers] = {}
    value = taken
    for number, (matrix, bias) in enumerate(layers, start=1):
        constants |= {f"W{number}": matrix, f"B{number}": bias}
        last = number == len(layers)
        added = given if last and not softmax else f"added{number}"
        nodes.append(_node("MatMul", value, f"W{number}", to=f"product{number}"))
        nodes.append(_node("Add", f"product{number}", f"B{number}", to=added))
        value = added if last else f"hidden{number}"
        if not last:
            nodes.append(_node("Relu", added, to=value))
    if softmax:
        nodes.append(helper.make_node("Softmax", [value], [given], axis=-1))
    inputs = [_value(taken, TensorProto.FLOAT, ["batch", layers[0][0].shape[0]])]
    outputs = [_value(given, TensorProto.FLOAT, ["batch", layers[-1][0].shape[1]])]
    return _model(name, nodes, inputs, outputs, constants)


def _node(operator: str, *takes: str, to: str) -> NodeProto:
    return helper.make_node(operator, list(takes), [to])


def _value(name: str, kind: int, shape: Sequence[int | str]) -> ValueInfoProto:
    # A size with a name is one that varies; "batch" in front is what lets requests be joined.
    return helper.make_tensor_value_info(name, kind, list(shape))


def _model(
    name: str,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: dict[str, Numbers] | None = None,
) -> ModelProto:
    initializers = [numpy_helper.from_array(array, key) for key, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), name, list(inputs), list(outputs), initializers)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="headrace-examples"
    )


def _fingerprint() -> str:
    """What the repository is made from, as one number: it changes when any of it does."""
    digest = hashlib.sha256()
    for path in _source_files():
        digest.update(f"{path.relative_to(SOURCES)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_files() -> Iterator[Path]:
    yield Path(__file__).resolve()
    yield from sorted(path for path in HANDWRITTEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


if __name__ == "__main__":
    sys.exit(main())
