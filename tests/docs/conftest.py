# SPDX-License-Identifier: Apache-2.0
"""The servers that guides talk to, one of each for all guides of a worker, and the documentation site."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT

from support.example_models import example_models
from support.programs import Program
from support.servers import serve_process


def ports_of(server: Program) -> dict[str, int]:
    """The ports of a server, by those that the documents name."""
    http, grpc = server.ports
    return {"8000": http, "8001": grpc}


@pytest.fixture(scope="session")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server with the built-in models, on free ports."""
    with serve_process(tmp_path_factory.mktemp("server") / "log", ready="ready: ") as server:
        yield ports_of(server)


@pytest.fixture(scope="session")
def example_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server as `make serve` starts it, but on free ports."""
    log = tmp_path_factory.mktemp("example_server") / "log"
    with serve_process(log, example_models(), ready="ready: ") as server:
        yield ports_of(server)


@pytest.fixture(scope="session")
def docs_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    arguments = [sys.executable, ROOT / "scripts/build_docs.py", folder]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
