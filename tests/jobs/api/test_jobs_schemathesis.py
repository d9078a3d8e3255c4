# SPDX-License-Identifier: Apache-2.0
"""The gateway's document, by schemathesis and by a few requests of our own: no accident, and only what the document says.

Once with ids made up, and once with those of real records. As bearer a raw key, which a logout does not end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_api import ORG, Api, job_api

from headrace.jobs.records import ExperimentSpec, WorkspaceSpec
from support.conformance import disagreement, operations

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 503]
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(None, tmp_path_factory.mktemp("schemathesis")) as made:
        yield made


def real_names(api: Api, folder: Path) -> str:
    jobs, call = api.jobs, api.server.call
    model = folder / "model.onnx"
    model.write_bytes(b"not looked at here")
    workspace = call(jobs.create_workspace, ORG, "u", WorkspaceSpec("w", "self_hosted", {"a": "b"}))[0].id
    ids = [call(jobs.register, ORG, "u", str(model), "x", "", "m") for _ in range(3)]
    spare = [call(jobs.create_experiment, ORG, "u", ExperimentSpec("x")).id for _ in range(2)]
    experiments = [identifier[0].id for identifier in ids] + spare
    return (
        f'[parameters]\n"path.org" = "{ORG}"\n"path.workspace" = "{workspace}"\n'
        f'"path.experiment" = {experiments}\n"path.job" = {[identifier[1].id for identifier in ids]}\n'
    )


@pytest.mark.parametrize("real", [False, True], ids=["ids made up", "ids of records"])
def test_every_answer_is_described(api: Api, tmp_path: Path, real: bool, caplog: pytest.LogCaptureFixture) -> None:
    document = api.ask("GET", "/openapi.json").json
    names = tomllib.loads(real_names(api, tmp_path))["parameters"] if real else {"path.org": ORG}
    results = []
    for method, path, operation in operations(document):
        target = re.sub(r"\{(\w+)\}", lambda part: _one(names.get(f"path.{part[1]}", str(uuid.uuid4()))), path)
        for body in [b"", b"{}", b"[1]", b"nonsense"] if method in ("POST", "PUT", "PATCH") else [None]:
            got = api.ask(method, target, body, api.keys["alice"])
            text = disagreement(document, operation, got.status, got.fields.get("content-type", ""), got.body)
            if text:
                results.append(f"{method} {target} with {body!r}: {text}")
    assert results == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _one(names: str | list[str]) -> str:
    return names if isinstance(names, str) else names[0]


@pytest.mark.slow
@pytest.mark.parametrize("phases", ["examples,coverage", "examples,fuzzing"])
def test_nothing_breaks_the_gateway(api: Api, tmp_path: Path, phases: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = real_names(api, tmp_path) if "fuzzing" in phases else f'[parameters]\n"path.org" = "{ORG}"\n'
    (tmp_path / "schemathesis.toml").write_text(settings + SETTINGS)
    program = str(Path(sys.executable).with_name("st"))
    # One thread: in several, Python 3.11's own compiler fails now and then.
    arguments = f"--phases {phases} --checks {CHECKS} --max-examples 8 --seed 1 --workers 1 --no-shrink"
    run = subprocess.run(
        [program, "--config-file", "schemathesis.toml", "run", f"http://127.0.0.1:{api.port}/openapi.json",
         *arguments.split(), "-H", f"Authorization: Bearer {api.keys['alice']}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:]
    document = api.ask("GET", "/openapi.json").json
    count = sum(len(item) for item in document["paths"].values()) - 1
    assert re.search(rf"Selected: {count}/{count}\s+Tested: {count}\s", run.stdout), run.stdout[-2000:]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
