# SPDX-License-Identifier: Apache-2.0
"""Measure the backend `onnxruntime` on a GPU beside ONNX Runtime itself, and print the table of docs/performance.md.

    python3 bench/scenarios/onnx_gpu.py
    python3 bench/scenarios/onnx_gpu.py --device cpu --seconds 0.5 --batches 1    # where there is no GPU

ResNet-50 and an encoder of twelve transformer layers are made on the spot. Requests go through Headrace's engine as those of
any protocol do, without HTTP; the other side is a session of ONNX Runtime's own, called in a loop with numpy in and out.
Then an ensemble of two convolutions with 12.8 MB between them: with the tensor left on the GPU, and over the host. At the
end all models are unloaded, and GPU memory is compared with that before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from pytorch_gpu import BETWEEN, ENSEMBLE, IMAGE, ROUNDS, Loop, rate_of  # noqa: E402

from bench.formats.onnx_file import write  # noqa: E402
from bench.resnet50 import CLASSES, resnet50  # noqa: E402
from headrace.engine.engine import EngineSettings, open_engine  # noqa: E402

WIDTH, HEADS, LAYERS, TOKENS = 768, 12, 12, 128
CONFIG = """backend: "onnxruntime"
max_batch_size: {most}
instance_group {{ kind: {kind} count: {count} }}
"""


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder) / "models", arguments))
    print(json.dumps(figures, indent=1))


async def measure(repository: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the models, ask them, unload them."""
    kind = "KIND_GPU" if arguments.device == "cuda" else "KIND_CPU"
    make_models(repository, kind)
    before = gpu_memory()
    engine = open_engine(EngineSettings((repository,)))
    await engine.start()
    loop = Loop(engine, arguments)
    figures: dict[str, Any] = {
        "onnxruntime": ort.__version__,
        "providers": ort.get_available_providers(),
        "not ready": [str(state) for state in engine.plane.states() if "READY" not in str(state)],
    }
    for model, shape in (("resnet50", IMAGE), ("encoder", (TOKENS, WIDTH))):
        own = session(repository / model / "1" / "model.onnx", arguments.device)
        on_cpu = session(repository / model / "1" / "model.onnx", "cpu")
        for batch in arguments.batches:
            rows = np.random.default_rng(batch).standard_normal((batch, *shape)).astype(np.float32)
            feed = {"INPUT0": rows}
            answer = await loop.ask(model, "INPUT0", rows, "OUTPUT0")
            expected = on_cpu.run(["OUTPUT0"], feed)[0]
            ours = theirs = 0.0
            for _ in range(ROUNDS):
                ours = max(ours, await loop.rate(model, "INPUT0", rows, 1, "OUTPUT0"))
                theirs = max(theirs, rate_of(partial(own.run, ["OUTPUT0"], feed), arguments.seconds))
            figures[f"{model}, batches of {batch}"] = {
                "requests/s": round(ours, 1),
                "of ONNX Runtime's own call, %": round(100 * ours / theirs, 1),
                "two instances and clients, times one": round(
                    await loop.rate(f"{model}_twice", "INPUT0", rows, 2, "OUTPUT0") / ours, 2
                ),
                "furthest from the CPU's, of the largest": float(
                    np.abs(answer - expected).max() / np.abs(expected).max()
                ),
            }
        del own, on_cpu
    image = np.random.default_rng(0).standard_normal((1, *IMAGE)).astype(np.float32)
    together = await loop.ask("ensemble", "IMAGE", image, "SCORES")
    apart = await loop.ask("narrow", "x", await loop.ask("wide", "x", image))
    figures["ensemble equals its steps"] = bool(np.array_equal(together, apart))
    for clients in (1, 8):
        figures[f"ensemble, {clients} clients, requests/s"] = {
            "tensor stays": round(await loop.rate("ensemble", "IMAGE", image, clients, "SCORES")),
            "over the host": round(await loop.pair_rate(image, clients)),
        }
    figures["MiB of GPU memory before, while serving"] = [before, gpu_memory()]
    await engine.close(10)
    figures["MiB of GPU memory after the models are unloaded"] = gpu_memory()
    return figures


def make_models(repository: Path, kind: str) -> None:
    """Write the repository."""
    for name, count in (("resnet50", 1), ("resnet50_twice", 2), ("encoder", 1), ("encoder_twice", 2)):
        version = folder_of(repository, name, CONFIG.format(kind=kind, count=count, most=64))
        if name.startswith("resnet50"):
            write(version / "model.onnx", resnet50, "resnet50", IMAGE, CLASSES)
        else:
            (version / "model.onnx").write_bytes(encoder())
    random = np.random.default_rng(1)
    wide, narrow = (random.standard_normal(shape).astype(np.float32) / 10 for shape in ((64, 3, 3, 3), (16, 64, 3, 3)))
    dense = random.standard_normal((16, 10)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4), helper.make_node("Relu", ["c"], ["OUTPUT__0"])]
    place(repository, "wide", kind, nodes, {"w": wide}, (1, *IMAGE), (1, *BETWEEN))
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[4, 4]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["m", "d"], ["OUTPUT__0"]),
    ]
    place(repository, "narrow", kind, nodes, {"w": narrow, "d": dense}, (1, *BETWEEN), (1, 10))
    folder_of(repository, "ensemble", ENSEMBLE.replace("[ 3,", "[ 1, 3,").replace("[ 10 ]", "[ 1, 10 ]"))


def folder_of(repository: Path, name: str, config: str) -> Path:
    """Make a model's folder; return that of its version."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return version


def place(
    repository: Path,
    name: str,
    kind: str,
    nodes: list[Any],
    weights: dict[str, Any],
    taken: tuple[int, ...],
    given: tuple[int, ...],
) -> None:
    """Write a model that does not batch."""
    version = folder_of(repository, name, CONFIG.format(kind=kind, count=1, most=0))
    (version / "model.onnx").write_bytes(serialised(nodes, weights, ("x", taken), ("OUTPUT__0", given)))


def encoder() -> bytes:
    """Return a transformer's encoder with random weights, without the normalisation of its parts."""
    random, weights, nodes = np.random.default_rng(5), dict[str, Any](), list[Any]()
    weights["heads"] = np.array([0, TOKENS, HEADS, WIDTH // HEADS])
    weights["flat"] = np.array([0, TOKENS, WIDTH])
    weights["scale"] = np.array((WIDTH // HEADS) ** -0.5, np.float32)

    def node(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    def dense(value: str, taken: int, given: int) -> str:
        name = f"w{len(weights)}"
        weights[name] = random.standard_normal((taken, given)).astype(np.float32) * taken**-0.5
        return node("MatMul", value, name)

    def norm(value: str) -> str:
        for name in ("ones", "zeros"):
            weights.setdefault(name, getattr(np, name)(WIDTH, np.float32))
        return node("LayerNormalization", value, "ones", "zeros", axis=-1)

    value = "INPUT0"
    for _ in range(LAYERS):
        given = norm(value)
        query, key, values = (node("Reshape", dense(given, WIDTH, WIDTH), "heads") for _ in range(3))
        query, values = (node("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, values))
        scores = node("Mul", node("MatMul", query, node("Transpose", key, perm=[0, 2, 3, 1])), "scale")
        mixed = node("MatMul", node("Softmax", scores, axis=-1), values)
        joined = node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), "flat")
        value = node("Add", value, dense(joined, WIDTH, WIDTH))
        inner = node("Relu", dense(norm(value), WIDTH, 4 * WIDTH))
        value = node("Add", value, dense(inner, 4 * WIDTH, WIDTH))
    nodes.append(helper.make_node("Identity", [norm(value)], ["OUTPUT0"]))
    shape = ("rows", TOKENS, WIDTH)
    return serialised(nodes, weights, ("INPUT0", shape), ("OUTPUT0", shape))


def serialised(nodes: list[Any], weights: dict[str, Any], taken: tuple[str, Any], given: tuple[str, Any]) -> bytes:
    """Return a model of float32 tensors."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (taken, given)]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "model", values[:1], values[1:], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def session(file: Path, device: str) -> Any:
    """Open a session of ONNX Runtime's own."""
    providers = ["CUDAExecutionProvider"] if device == "cuda" else []
    options = ort.SessionOptions()
    if device == "cpu":
        options.intra_op_num_threads = 8
    return ort.InferenceSession(str(file), options, providers=[*providers, "CPUExecutionProvider"])


def gpu_memory() -> int | None:
    """Return the used memory of the first GPU in MiB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    main()
