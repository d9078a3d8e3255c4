# SPDX-License-Identifier: Apache-2.0
"""Measure the backend `pytorch` on a GPU beside PyTorch itself, and print the table of docs/performance.md.

    python3 bench/scenarios/pytorch_gpu.py
    python3 bench/scenarios/pytorch_gpu.py --device cpu --seconds 0.5 --batches 1    # where there is no GPU

Models are made on the spot. Requests go through Headrace's engine as those of any protocol do, without HTTP; the other side
is the same file called in a loop, numpy in and out. Then an ensemble of two nets with 12.8 MB between them, once with the
tensor left on the GPU and once over the host, a Python model that computes on the GPU in a process of its own, and an
AOTInductor package, where this machine can compile one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from bench.formats.pytorch_file import Network  # noqa: E402
from bench.resnet50 import resnet50  # noqa: E402
from headrace.core.dtypes import FP32  # noqa: E402
from headrace.core.requests import InferRequest, RequestedOutput  # noqa: E402
from headrace.core.tensors import Tensor  # noqa: E402
from headrace.engine.engine import EngineSettings, open_engine  # noqa: E402

IMAGE = (3, 224, 224)
ROUNDS = 5
BETWEEN = (64, 224, 224)
"""Of the ensemble: 12.8 MB of FP32."""
CONFIG = """backend: "{backend}"
max_batch_size: {most}
input {{ name: "{given}" data_type: TYPE_FP32 dims: [ {taken} ] }}
output {{ name: "{made}" data_type: TYPE_FP32 dims: [ {out} ] }}
instance_group {{ kind: {kind} count: {count} }}
{more}"""
ENSEMBLE = """platform: "ensemble"
input { name: "IMAGE" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ 10 ] }
ensemble_scheduling {
  step { model_name: "wide" model_version: -1
    input_map { key: "x" value: "IMAGE" } output_map { key: "OUTPUT__0" value: "between" } }
  step { model_name: "narrow" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "OUTPUT__0" value: "SCORES" } }
}
"""
PYTHON = """import numpy as np
import torch
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.device = torch.device("cuda" if args["model_instance_kind"] == "GPU" else "cpu")

    def execute(self, requests):
        answers = []
        for request in requests:
            value = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()).to(self.device)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT__0", (value @ value.T).cpu().numpy())]))
        return answers
"""


class Wide(nn.Module):
    """The first of the ensemble."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An image, and 64 planes of its size."""
        return torch.relu(self.conv(x))


class Narrow(nn.Module):
    """The second of the ensemble."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 16, 3, stride=4)
        self.dense = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """64 planes, and ten scores."""
        return self.dense(torch.relu(self.conv(x)).mean((2, 3)))


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
    torch.manual_seed(7)
    torch.backends.cudnn.allow_tf32 = False
    cuda = arguments.device == "cuda"
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    with tempfile.TemporaryDirectory() as folder:
        figures |= asyncio.run(through_the_engine(Path(folder), arguments))
    print(json.dumps(figures, indent=1))


def place(repository: Path, name: str, config: str, net: nn.Module | None = None, taken: tuple[int, ...] = ()) -> Path:
    """A model's folder, with its file."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if net is not None:
        with torch.no_grad():
            net.eval()(torch.zeros(1, *taken))
            torch.jit.trace(net, torch.zeros(1, *taken)).save(str(version / "model.pt"))
    return version


def written(kind: str, taken: tuple[int, ...], out: tuple[int, ...], **more: Any) -> str:
    """A configuration."""
    told = {"backend": "pytorch", "most": 64, "given": "x", "made": "OUTPUT__0", "count": 1, "more": ""} | more
    return CONFIG.format(kind=kind, taken=", ".join(map(str, taken)), out=", ".join(map(str, out)), **told)


async def through_the_engine(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    kind = "KIND_GPU" if arguments.device == "cuda" else "KIND_CPU"
    repository = folder / "models"
    half = 'parameters { key: "precision" value { string_value: "fp16" } }'
    for name, count, more in (("resnet50", 1, ""), ("resnet50_twice", 2, ""), ("resnet50_fp16", 1, half)):
        place(repository, name, written(kind, IMAGE, (1000,), count=count, more=more), Network(resnet50), IMAGE)
    place(repository, "wide", written(kind, (1, *IMAGE), (1, *BETWEEN), most=0), Wide(), IMAGE)
    place(repository, "narrow", written(kind, (1, *BETWEEN), (1, 10), most=0), Narrow(), BETWEEN)
    python = place(repository, "python", written(kind, (256, 256), (256, 256), backend="python", most=0))
    (python / "model.py").write_text(PYTHON)
    ensemble = ENSEMBLE.replace("[ 3,", "[ 1, 3,").replace("[ 10 ]", "[ 1, 10 ]")
    place(repository, "ensemble", ensemble)
    compiled = package(repository, kind, arguments.device)
    engine = open_engine(EngineSettings((repository,)))
    await engine.start()
    loop = Loop(engine, arguments)
    figures: dict[str, Any] = {"states": [str(state) for state in engine.plane.states() if "READY" not in str(state)]}
    own, half_own = (
        torch.jit.load(str(repository / "resnet50/1/model.pt"), map_location=arguments.device) for _ in range(2)
    )
    half_own.half()
    for batch in arguments.batches:
        rows = np.random.default_rng(batch).standard_normal((batch, *IMAGE)).astype(np.float32)
        answer, expected = await loop.ask("resnet50", "x", rows), call(own, rows, arguments.device)
        figures[f"ResNet-50, batches of {batch}"] = {
            "of PyTorch's own call, %": await loop.percent("resnet50", own, rows),
            "fp16, of the own call, %": await loop.percent("resnet50_fp16", half_own, rows, half=True),
            "two instances and clients, times one": round(
                await loop.rate("resnet50_twice", "x", rows, 2) / await loop.rate("resnet50_twice", "x", rows, 1), 2
            ),
            "furthest from PyTorch": float(np.abs(answer - expected).max()),
        }
    image = np.random.default_rng(0).standard_normal((1, *IMAGE)).astype(np.float32)
    for clients in (1, 8):
        figures[f"ensemble, {clients} clients, requests/s"] = {
            "tensor stays": round(await loop.rate("ensemble", "IMAGE", image, clients, "SCORES")),
            "over the host": round(await loop.pair_rate(image, clients)),
        }
    square = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    answer = await loop.ask("python", "x", square)
    figures["Python model"] = {
        "furthest from numpy": float(np.abs(answer - square @ square.T).max()),
        "requests/s": round(await loop.rate("python", "x", square, 1)),
    }
    figures["AOTInductor"] = compiled if compiled != "compiled" else await loop.compiled()
    await engine.close(10)
    return figures


def package(repository: Path, kind: str, device: str) -> str:
    """Compile the small net in a process of its own: PyTorch's compiler, and what loads its packages, may end it."""
    version = place(repository, "compiled", written(kind, BETWEEN, (10,), more=_NATIVE))
    arguments = [sys.executable, __file__, "--compile", str(version / "model.pt2"), device]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=400)
    if done.returncode == 0:
        return "compiled"
    (repository / "compiled" / "config.pbtxt").unlink()
    (version / "model.pt2").unlink(missing_ok=True)
    version.rmdir()
    version.parent.rmdir()
    return f"PyTorch itself cannot (ended with {done.returncode}): {done.stderr.strip()[-300:]}"


_NATIVE = 'parameters { key: "ALLOW_NATIVE_CODE" value { string_value: "true" } }'


def compile_to(file: str, device: str) -> None:
    """The other process."""
    torch.manual_seed(7)
    net = Narrow().eval().to(device)
    example = (torch.zeros(2, *BETWEEN, device=device),)
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(net, example, dynamic_shapes={"x": {0: rows}})
    torch._inductor.aoti_compile_and_package(program, package_path=file)
    print("loading it by PyTorch alone", file=sys.stderr, flush=True)
    torch._inductor.aoti_load_package(file)


class Loop:
    """Asks an engine again and again."""

    def __init__(self, engine: Any, arguments: argparse.Namespace) -> None:
        self._plane = engine.plane
        self._seconds = arguments.seconds
        self._device = arguments.device

    async def ask(self, model: str, given: str, rows: Any, wanted: str = "OUTPUT__0") -> Any:
        """One answer."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = InferRequest(model, [Tensor(given, FP32, rows)], outputs=[RequestedOutput(wanted)])
        self._plane.infer(request, answered.set_result)
        answer = await answered
        if isinstance(answer, BaseException):
            raise answer
        return answer.outputs[0].array

    async def rate(self, model: str, given: str, rows: Any, clients: int, wanted: str = "OUTPUT__0") -> float:
        """Requests a second."""
        return await self._rate(lambda: self.ask(model, given, rows, wanted), clients)

    async def percent(self, model: str, own: Any, rows: Any, *, half: bool = False) -> float:
        """The engine's rate of PyTorch's own: the best of some rounds each, in turn, since others use the machine, too."""
        ours = theirs = 0.0
        for _ in range(ROUNDS):
            ours = max(ours, await self.rate(model, "x", rows, 1))
            theirs = max(theirs, own_rate(own, rows, self._device, self._seconds, half))
        return round(100 * ours / theirs, 1)

    async def pair_rate(self, image: Any, clients: int) -> float:
        """The two models of the ensemble asked one after the other."""

        async def both() -> None:
            await self.ask("narrow", "x", await self.ask("wide", "x", image))

        return await self._rate(both, clients)

    async def compiled(self) -> dict[str, Any]:
        """The package answers."""
        rows = np.random.default_rng(0).standard_normal((4, *BETWEEN)).astype(np.float32)
        answer = await self.ask("compiled", "x", rows)
        return {"shape": answer.shape, "finite": bool(np.isfinite(answer).all())}

    async def _rate(self, once: Callable[[], Any], clients: int) -> float:
        for _ in range(5):
            await once()
        count, end = 0, time.perf_counter() + self._seconds

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await once()
                count += 1

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return count / (time.perf_counter() - begin)


def call(net: Any, rows: Any, device: str, half: bool = False) -> Any:
    """PyTorch's own."""
    with torch.inference_mode():
        given = torch.from_numpy(rows).to(device)
        return net(given.half() if half else given).float().cpu().numpy()


def own_rate(net: Any, rows: Any, device: str, seconds: float, half: bool) -> float:
    """Calls a second."""
    return rate_of(lambda: call(net, rows, device, half), seconds)


def rate_of(once: Callable[[], Any], seconds: float) -> float:
    """Return calls a second, after five that are not counted."""
    for _ in range(5):
        once()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        once()
        count += 1
    return count / (time.perf_counter() - begin)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_to(*sys.argv[2:])
    else:
        main()
