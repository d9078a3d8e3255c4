# SPDX-License-Identifier: Apache-2.0
"""A command whose extra is not installed names the extra in one line and exits with code 2; other import errors pass."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import headrace
from headrace.cli import root
from headrace.cli.commands import CommandSpec
from headrace.cli.root import Root
from headrace.core.extras import EXTRA_OF_MODULE, MissingExtra
from support.programs import run

ROOT = Path(headrace.__file__).parents[1]
REQUIRED = {"google", "hpack", "httptools", "numpy", "orjson", "rich", "typer", "uvloop", "websockets", "yaml"}
"""The modules of the packages that are always installed."""
WITHOUT_EXTRA = {"cuda", "tensorrt", "triton"}
"""Modules of packages that no extra installs: they depend on the GPU, or come with PyTorch."""
FOR_TYPES = {"_typeshed"}
WITH_OTHERS = {"tqdm", "yarl"}
"""Modules that come with a package of the table: tqdm with huggingface-hub, yarl with aiohttp."""
IMPORTED_BY_OTHERS = {"psycopg"}
"""Imported by SQLAlchemy, not by Headrace."""

GROUP = typer.Typer(no_args_is_help=True)
WANTED = {"module": ""}
"""The module that the commands below import."""


def single() -> None:
    """Import the module."""
    importlib.import_module(WANTED["module"])


@GROUP.command()
def below() -> None:
    """Import the module."""
    single()


@GROUP.command()
def other() -> None:
    """Make a group of this Typer."""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A `headrace` command with two commands of this test."""
    monkeypatch.setitem(sys.modules, "missing_extras_commands", sys.modules[__name__])
    commands = (
        CommandSpec("single", "missing_extras_commands:single", "Import the module."),
        CommandSpec("group", "missing_extras_commands:GROUP", "Import the module."),
    )
    monkeypatch.setattr(root, "SECTIONS", {"Commands": commands})
    application = typer.Typer(name="headrace", cls=Root, pretty_exceptions_enable=False)
    application.callback()(lambda: None)
    return application


@pytest.mark.parametrize("words", [("single",), ("group", "below")], ids=" ".join)
@pytest.mark.parametrize("module", EXTRA_OF_MODULE)
def test_a_missing_package_of_an_extra_is_one_line(
    app: typer.Typer, module: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(WANTED, "module", module)
    done = CliRunner().invoke(app, list(words))
    extra = EXTRA_OF_MODULE[module]
    line = f"error: headrace {' '.join(words)} needs the extra \"{extra}\": pip install 'headrace[{extra}]'\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize("module", ["no_such_package", "headrace.no_such_module", "tensorrt_of_nobody.part"])
def test_another_missing_module_keeps_its_traceback(
    app: typer.Typer, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WANTED, "module", module)
    done = CliRunner().invoke(app, ["single"])
    assert isinstance(done.exception, ModuleNotFoundError) and done.stderr == ""


def test_a_package_that_is_installed_but_broken_keeps_its_traceback(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcudart.so.12: cannot open shared object file", name="torch")

    monkeypatch.setitem(sys.modules, "missing_extras_commands", sys.modules[__name__])
    monkeypatch.setattr(importlib, "import_module", broken, raising=True)
    monkeypatch.setattr(root, "import_module", lambda name: sys.modules[name])
    done = CliRunner().invoke(app, ["single"])
    assert type(done.exception) is ImportError and done.stderr == ""


def test_a_submodule_of_a_package_counts_as_the_package(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    """opentelemetry-api is installed, and opentelemetry-sdk is not."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(WANTED, "module", "opentelemetry.sdk")
    done = CliRunner().invoke(app, ["single"])
    assert done.exit_code == 2 and "headrace[trace]" in done.stderr


def test_an_error_that_names_the_extra_itself_ends_the_same_way(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Any:
        raise MissingExtra("s3://bucket", "cloud", "use a folder")

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(root, "import_module", lambda name: sys.modules[name])
    done = CliRunner().invoke(app, ["single"])
    line = "error: s3://bucket needs the extra \"cloud\": pip install 'headrace[cloud]', or use a folder\n"
    assert (done.exit_code, done.stderr) == (2, line)


SPANS = "headrace.core.telemetry.opentelemetry_spans"


@pytest.mark.parametrize(
    ("words", "module", "subject", "extra"),
    [
        ("get isvc --kube", "httpx2", "access to Kubernetes", "kubernetes"),
        ("describe isvc a --kube", "httpx2", "access to Kubernetes", "kubernetes"),
        ("rollout status a --kube", "httpx2", "access to Kubernetes", "kubernetes"),
        ("service start --platform kubernetes --arch cosmos-rl --model-path /", "httpx2", "access to", "kubernetes"),
        ("infer m --url grpc://127.0.0.1:1", "grpc", "grpc://", "grpc"),
        ("bench m --url grpc://127.0.0.1:1", "grpc", "grpc://", "grpc"),
        ("bench m --plot a.png", "matplotlib.figure", "--plot", "plot"),
        ("batch m in.jsonl out.parquet", "pyarrow.parquet", "the output out.parquet", "parquet"),
        ("batch m in.jsonl s3://b/out.jsonl", "obstore", "s3://b/out.jsonl", "cloud"),
        ("users list --data-dir . --database-url postgresql://h/d", "psycopg", "PostgreSQL", "postgresql"),
        ("router --port 0 --backend http://127.0.0.1:1 --trace-endpoint http://h", "opentelemetry", "tracing", "trace"),
        ("up --state-dir . --trace-endpoint http://h", "opentelemetry", "tracing", "trace"),
    ],
    ids=lambda value: value if " " in value else "",
)
def test_an_option_or_a_url_names_its_extra(
    words: str, module: str, subject: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    monkeypatch.delitem(sys.modules, SPANS, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    done = run(*words.split(), cwd=tmp_path, env={"HOME": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "needs the extra" in line)
    assert line.startswith(f"error: {subject}") and f"\"{extra}\": pip install 'headrace[{extra}]'" in line
    assert "Traceback" not in done.stderr and "try:" not in done.stderr


def test_preflight_and_doctor_list_a_missing_extra_among_their_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    line = "access to Kubernetes needs the extra \"kubernetes\": pip install 'headrace[kubernetes]'"
    done = run("service", "preflight", "--platform", "kubernetes", env={"HOME": str(tmp_path)})
    assert done.returncode == 1 and line in done.stdout
    done = run("doctor", "--platform", "kubernetes", "--json", env={"HOME": str(tmp_path)})
    findings = json.loads(done.stdout)["findings"]
    (found,) = (finding for finding in findings if finding["message"] == line)
    assert found["fix"] == "pip install 'headrace[kubernetes]'"


def test_the_table_has_every_optional_module_that_is_imported() -> None:
    imported = set(imported_modules()) - set(sys.stdlib_module_names) - REQUIRED - {"headrace"}
    assert imported - WITHOUT_EXTRA - FOR_TYPES - WITH_OTHERS == EXTRA_OF_MODULE.keys() - IMPORTED_BY_OTHERS


def test_the_extra_of_the_table_installs_the_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distributions = packages_distributions()
    checked = 0
    for module, extra in EXTRA_OF_MODULE.items():
        packages = {canonicalize_name(Requirement(line).name) for line in project["optional-dependencies"][extra]}
        results = {canonicalize_name(name) for name in distributions.get(module, ())}
        assert not results or results & packages, f"{module} is of {results}, which the extra {extra} does not install"
        checked += bool(results)
    assert checked > len(EXTRA_OF_MODULE) - 3  # nvidia-ml-py is for GPUs


def _name_of(function: ast.expr) -> str:
    """`name` of `name(...)` and of `module.name(...)`."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def imported_modules() -> Iterator[str]:
    """The first part of every absolute import in Headrace, also of those by `import_module("name")`."""
    for path in Path(headrace.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield (node.module or "").partition(".")[0]
            elif isinstance(node, ast.Call) and _name_of(node.func) == "import_module":
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    yield str(name.value).partition(".")[0]
