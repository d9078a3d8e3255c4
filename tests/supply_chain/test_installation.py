# SPDX-License-Identifier: Apache-2.0
"""Wheel and sdist in empty environments without extras: every module, every command and every backend.

And docs/guides/install.md has every extra of pyproject.toml.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lock
import pytest
from packaging.requirements import Requirement

from headrace.backends.table import EXTRAS as BACKEND_EXTRAS
from headrace.core.extras import EXTRA_OF_MODULE
from support.programs import PLAIN, Program

ROOT = Path(__file__).parents[2]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = sorted({RUNNING, "3.11", "3.12", "3.13"})
GPU_MODULES = {"tensorrt", "cuda", "triton"}
"""Modules that no extra installs."""

WITH_EXTRAS = (
    "headrace.api.access.authenticator",
    "headrace.api.access.tokens",
    "headrace.api.access.users",
    "headrace.backends.",
    "headrace.core.telemetry.opentelemetry_spans",
    "headrace.fleet.agent.",
    "headrace.fleet.cluster.",
    "headrace.fleet.ray_serve.",
    "headrace.jobs.",
    "headrace.programs.gateway",
    "headrace.programs.model_agent",
    "headrace.programs.operator",
)
"""Modules, and packages that have modules, which may need an extra. All others are imported without."""

COMMAND_EXTRAS = {
    ("gateway",): "jobs",
    ("users",): "jobs",
    ("jobs",): "jobs",
    ("operator", "run"): "kubernetes",
    ("model-agent",): "kubernetes",
}
"""Commands that need an extra whatever their arguments are, by the words that they begin with."""
NEED_NO_EXTRA = {("gateway", "manifests")}
"""Except these, which print documents."""

ARGUMENTS = {
    ("completion",): "bash",
    ("explain",): "-f service.yaml",
    ("keys", "create"): "somebody",
    ("model-agent",): "--node somewhere",
    ("models", "check"): "models",
    ("models", "init"): "model.onnx --repository made",
    ("serve",): "no-such-folder --http-port 0 --grpc-port 0",
    ("router",): "--config no-such-file.yaml",
    ("up",): "--state-dir model.onnx",
    ("microservice",): "--model-path no-such-model --host 203.0.113.1",
}
"""Arguments of commands that are not just given a word for everything that they require. Programs fail at start."""

OPTIONS = [
    ("get isvc --kube", "kubernetes"),
    ("apply -f service.yaml --kube", "kubernetes"),
    ("describe isvc a --kube", "kubernetes"),
    ("delete isvc a --kube", "kubernetes"),
    ("rollout status a --kube", "kubernetes"),
    ("service start --platform kubernetes --arch cosmos-rl --model-path /", "kubernetes"),
    ("infer m --url grpc://127.0.0.1:1", "grpc"),
    ("bench m --url grpc://127.0.0.1:1", "grpc"),
    ("bench m --plot a.png", "plot"),
    ("batch models in.jsonl out.parquet", "parquet"),
    ("batch models s3://bucket/in.jsonl out.jsonl", "cloud"),
    ("batch models in.jsonl s3://bucket/out.jsonl", "cloud"),
    ("batch model.onnx in.jsonl out.jsonl", "onnx"),
    ("models convert net.pb net.onnx", "netdef"),
    ("serve s3://bucket/models --http-port 0 --grpc-port 0", "cloud"),
    ("serve models --trace-config mode=opentelemetry --trace-config rate=1 --http-port 0 --grpc-port 0", "trace"),
    (
        "serve models --rate-limit-per-minute 1 --rate-limit-redis-url redis://127.0.0.1 --http-port 0 --grpc-port 0",
        "redis",
    ),
    ("router --backend http://127.0.0.1:1 --port 0 --trace-endpoint http://127.0.0.1:1", "trace"),
    ("up --state-dir fleet --trace-endpoint http://127.0.0.1:1", "trace"),
]
"""Options and URLs that need an extra."""

BUILD = """
import sys
from setuptools import build_meta
kind, folder = sys.argv[1:]
{"sdist": build_meta.build_sdist, "wheel": build_meta.build_wheel}[kind](folder)
"""

IMPORT_ALL = """
import headrace, importlib, json, pkgutil
missing, names = {}, []
for module in pkgutil.walk_packages(headrace.__path__, "headrace.", onerror=lambda name: None):
    names.append(module.name)
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps([names, missing]))
"""

LIST_COMMANDS = """
import json
from headrace.cli.commands import SECTIONS
from headrace.cli.root import load_command

def commands(command, path):
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        words = []
        for parameter in command.params:
            if parameter.required:
                words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
                words += ["1" if parameter.type.name in ("integer", "float") else "a"]
        yield path, words
    for name, each in below.items():
        yield from commands(each, [*path, name])

specs = [spec for section in SECTIONS.values() for spec in section]
print(json.dumps([row for spec in specs for row in commands(load_command(spec), [spec.name])]))
"""


class Installation:
    """An environment with the wheel and no extras."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder = folder
        self.work = work
        self.headrace = folder / "bin" / "headrace"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KUBE", "HEADRACE"))
        }
        self.environ = {**kept, **PLAIN, "HOME": str(work), "COLUMNS": "200"}

    def python(self, code: str) -> Any:
        """The JSON that a program prints."""
        command = [self.folder / "bin" / "python", "-c", code]
        done = subprocess.run(command, env=self.environ, cwd=self.work, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `headrace`. A command that does not end fails the test."""
        return subprocess.run(
            [self.headrace, *arguments],
            env=self.environ,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the working tree, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "headrace", source / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    _build("sdist", source, folder)
    unpacked = tmp_path_factory.mktemp("unpacked")
    archive = next(folder.glob("*.tar.gz"))
    subprocess.run(["tar", "--extract", "--strip-components=1", "--directory", unpacked, "--file", archive], check=True)
    _build("wheel", unpacked, folder)
    return folder


def _build(kind: str, source: Path, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, kind, folder], cwd=source, check=True, capture_output=True)


def _interpreter(version: str) -> str | None:
    if version == RUNNING:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    results = [*map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for path in results:  # pyenv's shims are there also for versions that are not selected
        if path and subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode == 0:
            return path
    return None


@pytest.fixture(scope="module", params=VERSIONS)
def installation(
    request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    python = _interpreter(request.param)
    if python is None:
        pytest.skip(f"needs Python {request.param}")
    folder, work = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("work")
    subprocess.run(["bash", ROOT / "scripts" / "make_venv.sh", python, folder], check=True)
    constraints = work / "constraints.txt"
    constraints.write_text(lock.constraints((lock.FOLDER / "all.lock").read_text()))
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints]
    subprocess.run([*pip, next(dist.glob("*.whl"))], check=True)
    write_files(work)
    yield Installation(folder, work)
    shutil.rmtree(folder)


def write_files(work: Path) -> None:
    """What the commands are given: a repository with one model, a model file, a service, one item."""
    write_model(work / "models" / "echo", "identity", "")
    (work / "model.onnx").write_bytes(onnx_model())
    (work / "net.pb").write_bytes(b"")
    (work / "in.jsonl").write_text("{}\n")
    service = {"apiVersion": "ome.io/v1beta1", "kind": "InferenceService", "metadata": {"name": "a"}, "spec": {}}
    (work / "service.yaml").write_text(json.dumps(service))


def onnx_model() -> bytes:
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "model", tensors[:1], tensors[1:])
    content: bytes = helper.make_model(graph).SerializeToString()
    return content


def write_model(folder: Path, backend: str, file: str) -> None:
    (folder / "1").mkdir(parents=True)
    tensors = (
        'input [{name: "x" data_type: TYPE_FP32 dims: [1]}]\noutput [{name: "y" data_type: TYPE_FP32 dims: [1]}]\n'
    )
    (folder / "config.pbtxt").write_text(f'backend: "{backend}"\nmax_batch_size: 4\n{tensors}')
    if file:
        (folder / "1" / file).write_bytes(b"")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_has_every_file_of_the_package(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("headrace/")}
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "headrace"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(listed.stdout.splitlines()) - packed == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_modules_that_need_no_extra_are_imported_without(installation: Installation) -> None:
    names, missing = installation.python(IMPORT_ALL)
    assert len(names) > 500
    assert {name.partition(".")[0] for name in missing.values()} <= EXTRA_OF_MODULE.keys() | GPU_MODULES
    assert [name for name in missing if not name.startswith(WITH_EXTRAS)] == []
    assert "headrace.programs.gateway" in missing, "an extra is installed: nothing is tested"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_ends_without_a_traceback(installation: Installation) -> None:
    commands = [(tuple(path), words) for path, words in installation.python(LIST_COMMANDS)]
    assert {("serve",), ("router",), ("router", "explain"), ("users", "add")} <= {path for path, _ in commands}

    def run(command: tuple[tuple[str, ...], list[str]]) -> tuple[tuple[str, ...], subprocess.CompletedProcess[str]]:
        path, words = command
        return path, installation.run(*path, *(ARGUMENTS[path].split() if path in ARGUMENTS else words))

    with ThreadPoolExecutor(2) as pool:
        for path, done in pool.map(run, commands):
            assert "Traceback" not in done.stdout + done.stderr, f"{path}: {done.stderr}"
            assert done.returncode in (0, 1, 2), f"{path}: {done.returncode} {done.stderr}"
            extra = next((extra for words, extra in COMMAND_EXTRAS.items() if path[: len(words)] == words), None)
            if extra is not None and path not in NEED_NO_EXTRA:
                line = (
                    f"error: headrace {' '.join(path)} needs the extra \"{extra}\": pip install 'headrace[{extra}]'\n"
                )
                assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
            elif "needs the extra" in done.stderr:
                assert done.returncode == 2, f"{path}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_option_that_needs_an_extra_names_it(installation: Installation) -> None:
    def run(option: tuple[str, str]) -> tuple[str, str, subprocess.CompletedProcess[str]]:
        return (*option, installation.run(*option[0].split()))

    with ThreadPoolExecutor(2) as pool:
        for words, extra, done in pool.map(run, OPTIONS):
            last = done.stderr.rstrip().rpartition("\n")[2].replace('\\"', '"')  # programs log JSON
            assert done.returncode == 2, f"{words}: {done.returncode} {done.stderr}"
            assert f"needs the extra \"{extra}\": pip install 'headrace[{extra}]'" in last, f"{words}: {done.stderr}"
            assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_without_extras_serves_and_names_what_each_backend_needs(
    installation: Installation, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    write_model(repository / "echo", "identity", "")
    for backend in BACKEND_EXTRAS:
        write_model(repository / backend, backend, "model.bin")
    arguments = ("serve", repository, "--http-port", "0", "--grpc-port", "0", "--exit-on-error", "false")
    with Program(
        *arguments,
        log=tmp_path / "log",
        command=(installation.headrace,),
        env=installation.environ,
        ready=re.compile(r"ready: \d+ model"),
    ) as server:
        done = installation.run("infer", "echo", "--input", "x=[[7]]", "--url", server.url)
        assert done.returncode == 0 and re.search(r"^y\b.*\b7$", done.stdout, re.MULTILINE), done.stderr
        index = json.loads(installation.run("models", "list", "--json", "--url", server.url).stdout)
    reasons = {model["name"]: model.get("reason", "") for model in index}
    for backend, extra in BACKEND_EXTRAS.items():
        assert reasons[backend] == f"backend '{backend}' needs the extra \"{extra}\": pip install 'headrace[{extra}]'"


def test_the_guide_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    combined = {name: lines for name, lines in extras.items() if all(line.startswith("headrace[") for line in lines)}
    single = {name: lines for name, lines in extras.items() if name not in {*combined, "test", "check", "docs"}}
    guide = (ROOT / "docs" / "guides" / "install.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \| (yes|no) \|$", guide, re.MULTILINE)
    packages = {name: re.findall(r"`([^`]+)`", cell) for name, cell, _ in rows}
    assert packages == {name: [Requirement(line).name for line in lines] for name, lines in single.items()}
    in_all = [name for name, _, answer in rows if answer == "yes"]
    assert sorted(in_all) == sorted(Requirement(*combined.pop("all")).extras)
    assert set(single) - set(in_all) == {"pytorch", "tensorflow", "llm", "gpu", "kv-events", "ray"}
    for name, lines in combined.items():
        (line,) = lines
        assert f"| `{name}` | `{line.removeprefix('headrace[').removesuffix(']')}` |" in guide
