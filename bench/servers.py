# SPDX-License-Identifier: Apache-2.0
"""The table of servers: the workloads of each, and the command that starts it.

Every command binds 127.0.0.1 only. The servers' own code is under peers/, run by the peer's own interpreter.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.dialects import OWN_CALL, PREDICT
from bench.errors import BenchError
from bench.formats import FORESTS, FORMATS, RESNET50, SMALL, Format
from bench.formats.files import model_file
from bench.models import (
    example_repository,
    headrace_repository,
    idle_repository,
    loading_repository,
    one_core_repository,
    predict_repository,
    resnet50_repository,
    triton_mlp_repository,
    triton_native_repository,
)
from bench.native import native_backends
from bench.proxies import haproxy, headrace_router, nginx, pump
from bench.server import Launch, Ports, Server
from bench.torchscript import torchscript_file
from bench.venvs import PEERS, site_packages, venv_of
from bench.workloads import CROWDS, IDLE, IDLE_MEMORY, MAX_IN_FLIGHT, OVERLOAD, PREDICT_MODEL, SLOW_MODEL, START


def _triton_python(ports: Ports) -> Launch:
    return _triton(ports, PEERS / "triton-python/models")


def _triton_native(ports: Ports) -> Launch:
    return _triton(ports, triton_native_repository(), native_backends())


def _triton_onnx(ports: Ports) -> Launch:
    return _triton(ports, triton_mlp_repository(wait_microseconds=0))


def _triton_onnx_wait(ports: Ports) -> Launch:
    return _triton(ports, triton_mlp_repository(wait_microseconds=100))


def _triton(ports: Ports, repository: Path, backends: Path | None = None) -> Launch:
    venv = venv_of("triton-python")
    packages = site_packages(venv)
    distribution = packages / "pytriton/tritonserver"
    if backends is None:
        backends = distribution / "backends"
        stub = _python_stub(venv, distribution)
        # Triton looks for the stub beside the backend; the wheel keeps one per Python version elsewhere.
        shutil.copy2(stub, backends / "python/triton_python_backend_stub")
    command = [
        str(distribution / "bin/tritonserver"),
        "--model-repository", str(repository),
        "--backend-directory", str(backends),
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


def _headrace_examples(ports: Ports) -> Launch:
    return _headrace_serve(ports, example_repository())


def _headrace_nothing_loaded(ports: Ports) -> Launch:
    return _headrace_serve(ports, example_repository(), "--model-control-mode", "explicit")


def _headrace_predict(ports: Ports) -> Launch:
    return _headrace_serve(ports, predict_repository(PREDICT_MODEL, joined=True))


def _headrace_overload(ports: Ports) -> Launch:
    repository = predict_repository(SLOW_MODEL, joined=False)
    return _headrace_serve(ports, repository, "--max-in-flight", str(MAX_IN_FLIGHT))


def _fastapi_seed(ports: Ports) -> Launch:
    python, script = venv_of("fastapi") / "bin/python", PEERS / "fastapi-seed/seed_server.py"
    packages = str(site_packages(Path(sys.prefix)))
    command = [str(python), str(script), str(ports.http), str(torchscript_file(PREDICT_MODEL)), packages]
    # As for Headrace's PyTorch; the network is too small for a second thread to help.
    return Launch(command, {"OMP_NUM_THREADS": "1"})


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
    # One thread all the way down, as Headrace has it: the matrix library below PyTorch asks this variable only. Trees are
    # read by as many threads as there are cores, in Headrace too.
    threads = {} if kind.columns else {"OMP_NUM_THREADS": "1"}
    return Launch([sys.executable, script, kind.name, str(ports.http), shape, *files], threads)


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


def _of_forest(kind: Format) -> tuple[Server, ...]:
    """The same for its loading alone."""
    name, load = kind.name, (f"load-100mb-{kind.name}",)
    return (
        Server(f"headrace-{name}-load", load, partial(_headrace_loading, kind), READY, environment=OURS),
        Server(
            f"own-load-{name}", load, partial(_own_call, kind, (kind.large, SMALL)), READY, OWN_CALL, environment=OURS
        ),
    )


def _proxy(name: str, launch: Callable[[Ports], Launch], needs: str = "") -> Server:
    return Server(name, ("router",), launch, READY, environment=OURS, behind="headrace-handler", needs=needs)


SERVERS: dict[str, Server] = {
    server.name: server
    for server in (
        Server("headrace", (*EVERYTHING, *CROWDED, "processes"), _headrace, READY, environment=OURS),
        Server("headrace-2", ("processes",), _headrace_two_processes, READY, environment=OURS),
        Server("headrace-1core", (*MLP, *OVERHEAD), _headrace_one_core, READY, environment=OURS, one_core=True),
        Server("headrace-handler", OVERHEAD, _handler, READY, environment=OURS, one_core=True),
        Server("headrace-idle", (IDLE,), _headrace_idle, READY, environment=OURS),
        Server("headrace-memory", (IDLE_MEMORY,), _headrace_nothing_loaded, "/v2/health/live", environment=OURS),
        Server("headrace-start", (START,), _headrace_examples, READY, environment=OURS),
        Server("headrace-predict", ("predict",), _headrace_predict, READY, dialect=PREDICT, environment=OURS),
        Server("fastapi-seed", ("predict",), _fastapi_seed, "/healthz", dialect=PREDICT, environment="fastapi"),
        Server("headrace-overload", (OVERLOAD,), _headrace_overload, READY, PREDICT, environment=OURS, one_core=True),
        _proxy("headrace-router", headrace_router),
        _proxy("bare-pump", pump),
        _proxy("nginx", nginx, needs="nginx"),
        _proxy("haproxy", haproxy, needs="haproxy"),
        *(server for kind in FORMATS.values() for server in _of_format(kind)),
        *(server for kind in FORESTS.values() for server in _of_forest(kind)),
        Server("triton-python-onnx", MLP, _triton_onnx, READY, environment="triton-python", one_core=True),
        Server("triton-python-onnx-100us", MLP, _triton_onnx_wait, READY, environment="triton-python", one_core=True),
        Server("triton-python", (*EVERYTHING, *CROWDED), _triton_python, READY),
        Server(
            "triton-native",
            (*EVERYTHING, *CROWDED),
            _triton_native,
            READY,
            environment="triton-python",
            needs="gcc",
        ),
        Server("grpc-aio", ("grpc16", "grpc600k"), _grpc_aio, None),
        Server("fastapi", ("json16", "binary16", "binary600k"), _fastapi, READY),
        Server("mosec", ("json16", "binary16", "binary600k"), _mosec, "/metrics", dialect="simple"),
        Server("mlserver", ("json16", "grpc16", "grpc600k"), _mlserver, READY),
        Server("litserve", ("json16",), _litserve, "/health", dialect="simple"),
    )
}
