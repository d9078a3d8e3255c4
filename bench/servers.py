# SPDX-License-Identifier: Apache-2.0
"""The table of servers, read by runs.py: which workloads each one can do, and the command that starts it.

Every command binds 127.0.0.1 only. The servers' own code is under peers/, run by the peer's own interpreter.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.dialects import OWN_CALL
from bench.errors import BenchError
from bench.formats import FORMATS, Format
from bench.formats.files import RESNET50, SMALL, model_file
from bench.models import (
    headrace_repository,
    idle_repository,
    loading_repository,
    one_core_repository,
    resnet50_repository,
    triton_mlp_repository,
)
from bench.venvs import PEERS, site_packages, venv_of
from bench.workloads import CROWDS, IDLE


@dataclass(frozen=True)
class Ports:
    """Free ports of 127.0.0.1 picked for one run of a server."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True)
class Launch:
    """What to execute, and what to add to the environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """One column of the comparison."""

    name: str
    workloads: tuple[str, ...]
    launch: Callable[[Ports], Launch]
    # The path that answers 200 when the server is ready; None for a server that speaks gRPC only.
    ready_path: str | None
    dialect: str = "v2"
    # The environment under .venvs/ that it runs in, its name's unless told; "" for Headrace's own.
    environment: str | None = None
    # Whether it is held on one core, with the load generator on the others.
    one_core: bool = False

    @property
    def venv(self) -> str:
        return self.name if self.environment is None else self.environment

    @property
    def is_peer(self) -> bool:
        return bool(self.venv)


def _triton_python(ports: Ports) -> Launch:
    return _triton(ports, PEERS / "triton-python/models")


def _triton_onnx(ports: Ports) -> Launch:
    return _triton(ports, triton_mlp_repository(wait_microseconds=0))


def _triton_onnx_wait(ports: Ports) -> Launch:
    return _triton(ports, triton_mlp_repository(wait_microseconds=100))


def _triton(ports: Ports, repository: Path) -> Launch:
    venv = venv_of("triton-python")
    packages = site_packages(venv)
    distribution = packages / "pytriton/tritonserver"
    stub = _python_stub(venv, distribution)
    # Triton looks for the stub beside the backend; the wheel keeps one per Python version elsewhere.
    shutil.copy2(stub, distribution / "backends/python/triton_python_backend_stub")
    command = [
        str(distribution / "bin/tritonserver"),
        "--model-repository", str(repository),
        "--backend-directory", str(distribution / "backends"),
        "--http-address", "127.0.0.1", "--http-port", str(ports.http),
        "--grpc-address", "127.0.0.1", "--grpc-port", str(ports.grpc),
        "--metrics-address", "127.0.0.1", "--metrics-port", str(ports.metrics),
    ]  # fmt: skip
    # The stub embeds Python and finds its packages through the first python3 on PATH.
    path = f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    return Launch(command, {"PATH": path, "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs")})


def _python_stub(venv: Path, distribution: Path) -> Path:
    version = site_packages(venv).parent.name.removeprefix("python")
    stub = distribution / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise BenchError(f"the nvidia-pytriton wheel has no Python backend stub for Python {version}")
    stub.chmod(0o755)
    libraries = subprocess.run(["ldd", str(stub)], capture_output=True, text=True, check=False).stdout
    if f"libpython{version}.so.1.0 => not found" in libraries:
        raise BenchError(f"Triton's Python backend needs libpython{version}.so: install libpython{version}")
    return stub


def _grpc_aio(ports: Ports) -> Launch:
    return _script("grpc-aio", "grpc_aio_server.py", str(ports.grpc))


def _fastapi(ports: Ports) -> Launch:
    return Launch([
        str(venv_of("fastapi") / "bin/uvicorn"), "fastapi_app:app", "--app-dir", str(PEERS / "fastapi"),
        "--host", "127.0.0.1", "--port", str(ports.http), "--workers", "1", "--loop", "uvloop",
        "--http", "httptools", "--no-access-log", "--log-level", "warning",
    ])  # fmt: skip


def _litserve(ports: Ports) -> Launch:
    return _script("litserve", "litserve_server.py", str(ports.http))


def _mosec(ports: Ports) -> Launch:
    return _script(
        "mosec",
        "mosec_server.py",
        "--address",
        "127.0.0.1",
        "--port",
        str(ports.http),
        "--log-level",
        "warning",
    )


def _mlserver(ports: Ports) -> Launch:
    settings = {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(ports.http),
        "MLSERVER_GRPC_PORT": str(ports.grpc),
        "MLSERVER_METRICS_PORT": str(ports.metrics),
        "MLSERVER_DEBUG": "false",  # the default, true, writes an access log
        "PYTHONPATH": str(PEERS / "mlserver"),
    }
    return Launch([str(venv_of("mlserver") / "bin/mlserver"), "start", str(PEERS / "mlserver/models")], settings)


def _script(peer: str, name: str, *arguments: str) -> Launch:
    return Launch([str(venv_of(peer) / "bin/python"), str(PEERS / peer / name), *arguments])


def _headrace(ports: Ports) -> Launch:
    return _headrace_serve(ports, headrace_repository())


def _headrace_two_processes(ports: Ports) -> Launch:
    return _headrace_serve(ports, headrace_repository(), "--processes", "2")


def _headrace_one_core(ports: Ports) -> Launch:
    return _headrace_serve(ports, one_core_repository())


def _headrace_idle(ports: Ports) -> Launch:
    return _headrace_serve(ports, idle_repository())


def _headrace_serve(ports: Ports, repository: Path, *more: str) -> Launch:
    program = Path(sys.executable).with_name("headrace")
    if not program.is_file():
        raise BenchError(f"{program} does not exist: run 'make install' (or pip install -e .) first")
    return Launch([
        str(program), "serve", str(repository),
        "--http-port", str(ports.http), "--grpc-port", str(ports.grpc), *more,
    ])  # fmt: skip


def _handler(ports: Ports) -> Launch:
    return Launch([sys.executable, str(PEERS / "handler/handler_server.py"), str(ports.http), str(ports.grpc)])


def _headrace_resnet50(kind: Format, instances: int, ports: Ports) -> Launch:
    return _headrace_serve(ports, resnet50_repository(kind, instances))


def _headrace_loading(kind: Format, ports: Ports) -> Launch:
    explicitly = ("--model-control-mode", "explicit", "--load-model", SMALL)
    return _headrace_serve(ports, loading_repository(kind), *explicitly)


def _own_call(kind: Format, plans: tuple[str, ...], ports: Ports) -> Launch:
    shape = ",".join(map(str, (1, *kind.image)))
    files = [str(model_file(kind, plan)) for plan in plans]
    script = str(PEERS / "own-call/own_call.py")
    # One thread all the way down, as Headrace has it: the matrix library below PyTorch asks this variable only.
    return Launch([sys.executable, script, kind.name, str(ports.http), shape, *files], {"OMP_NUM_THREADS": "1"})


READY = "/v2/health/ready"
EVERYTHING = ("json16", "binary16", "grpc16", "binary600k", "grpc600k")
MLP = ("mlp", "mlp-grpc")
OVERHEAD = ("overhead-binary", "overhead-grpc")
CROWDED = tuple(name for crowd in CROWDS.values() for name in crowd if name not in EVERYTHING)
OURS = ""


def _of_format(kind: Format) -> tuple[Server, ...]:
    """Headrace and the framework's own call, one after the other, so that the machine is the same for both."""
    name = kind.name
    served, two, load = (f"resnet50-{name}",), (f"two-instances-{name}",), (f"load-100mb-{name}",)
    ours = partial(Server, ready_path=READY, environment=OURS)
    own = partial(ours, dialect=OWN_CALL)
    return (
        ours(f"headrace-{name}", served, partial(_headrace_resnet50, kind, 1), one_core=True),
        own(f"own-call-{name}", served, partial(_own_call, kind, (RESNET50,)), one_core=True),
        ours(f"headrace-{name}-x1", two, partial(_headrace_resnet50, kind, 1)),
        ours(f"headrace-{name}-x2", two, partial(_headrace_resnet50, kind, 2)),
        ours(f"headrace-{name}-load", load, partial(_headrace_loading, kind)),
        own(f"own-load-{name}", load, partial(_own_call, kind, (RESNET50, SMALL))),
    )


SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        Server("headrace", (*EVERYTHING, *CROWDED, "processes"), _headrace, READY, environment=OURS),
        Server("headrace-2", ("processes",), _headrace_two_processes, READY, environment=OURS),
        Server("headrace-1core", (*MLP, *OVERHEAD), _headrace_one_core, READY, environment=OURS, one_core=True),
        Server("headrace-handler", OVERHEAD, _handler, READY, environment=OURS, one_core=True),
        Server("headrace-idle", (IDLE,), _headrace_idle, READY, environment=OURS),
        *(server for kind in FORMATS.values() for server in _of_format(kind)),
        Server("triton-python-onnx", MLP, _triton_onnx, READY, environment="triton-python", one_core=True),
        Server("triton-python-onnx-100us", MLP, _triton_onnx_wait, READY, environment="triton-python", one_core=True),
        Server("triton-python", (*EVERYTHING, *CROWDED), _triton_python, READY),
        Server("grpc-aio", ("grpc16", "grpc600k"), _grpc_aio, None),
        Server("fastapi", ("json16", "binary16", "binary600k"), _fastapi, READY),
        Server("mosec", ("json16", "binary16", "binary600k"), _mosec, "/metrics", dialect="simple"),
        Server("mlserver", ("json16", "grpc16", "grpc600k"), _mlserver, READY),
        Server("litserve", ("json16",), _litserve, "/health", dialect="simple"),
    )
}
