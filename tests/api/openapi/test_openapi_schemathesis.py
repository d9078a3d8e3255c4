# SPDX-License-Identifier: Apache-2.0
"""Schemathesis over the whole document, against a server in a process of its own: it has no accident and says what it does.

Once with names made up, which mostly lead to nothing, and once with those of real models.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from described_server import DescribedServer, described_server, make_models

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 503]
"""
REAL_NAMES = """
[parameters]
"path.model" = ["echo", "sums", "upper", "repeat", "nothing"]
"path.version" = "1"
"""


pytestmark = pytest.mark.slow  # the same checks, for fewer requests: `tests/api/test_bad_input_corpus.py`


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DescribedServer]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with described_server(make_models(folder / "models"), folder / "log") as running:
        yield running
    assert "Traceback" not in (folder / "log").read_text()


@pytest.mark.parametrize(
    ("phases", "settings"),
    [("examples,coverage", ""), ("examples,fuzzing", REAL_NAMES)],
    ids=["names made up", "names of models"],
)
def test_nothing_breaks_the_server(server: DescribedServer, tmp_path: Path, phases: str, settings: str) -> None:
    (tmp_path / "schemathesis.toml").write_text(settings + SETTINGS)
    program = str(Path(sys.executable).with_name("st"))
    # One thread: in several, Python 3.11's own compiler fails now and then.
    arguments = f"--phases {phases} --checks {CHECKS} --max-examples 8 --seed 1 --workers 1 --no-shrink"
    run = subprocess.run(
        [program, "--config-file", "schemathesis.toml", "run", f"{server.url}/openapi.json", *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    # It leaves out the one that it reads the document from.
    count = sum(len(item) for item in server.document()["paths"].values()) - 1
    assert re.search(rf"Selected: {count}/{count}\s+Tested: {count}\s", run.stdout), run.stdout[-2000:]
    assert server.alive()
