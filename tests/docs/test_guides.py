# SPDX-License-Identifier: Apache-2.0
"""Each document is followed like a reader would: what it tells to type works, and shows what it shows.

Each is a test of its own worker group, so that several run side by side.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks_of, documents, name_of, steps_of
from doc_session import Mismatch, Session, first_missing

from support.ports import launchers_ports
from support.programs import Program


def runs_something(document: Path) -> bool:
    return any(block.language in ("console", "python") for block in blocks_of(document.read_text()))


def tools_of(document: Path) -> set[str]:
    """The programs beside our own that a document needs."""
    steps = [
        step for block in blocks_of(document.read_text()) if block.language == "console" for step in steps_of(block)
    ]
    words = {word for step in steps for word in re.findall(r"\w+", step.command)}
    return words & {"curl", "openssl", "pgrep"}


MADE = {"docs/guides/architectures.md", "docs/guides/serve-options.md", "docs/reference/commands.md"}
"""Tables made from the code, which tests beside that code compare with it."""
ELSEWHERE = {
    "docs/guides/kubernetes-services.md",
    "docs/guides/cloud-platforms.md",
    "docs/guides/slurm.md",
    "docs/guides/inference-services.md",
    "docs/guides/install-on-kubernetes.md",
    "docs/guides/model-agent.md",
}
"""What they tell needs a cluster or an account; `tests/platforms` tries it where there is one, or a stand-in."""
RUN = [document for document in documents() if runs_something(document)]


def guide(document: Path) -> object:
    name = name_of(document)
    return pytest.param(document, id=name, marks=pytest.mark.worker(name))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a document may start several servers, and the machine may be busy
@pytest.mark.parametrize("document", [guide(document) for document in RUN])
def test_instructions_to_the_reader_work(document: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    missing = sorted(tool for tool in tools_of(document) if shutil.which(tool) is None)
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    # The README begins with `make serve`; the guides with `headrace serve`, or start what they need themselves.
    session = Session(tmp_path, request.getfixturevalue("example_ports" if document.name == "README.md" else "ports"))
    text = document.read_text()
    with launchers_ports() if "$ headrace service start" in text else nullcontext():
        try:
            assert session.follow(text) > 0
        finally:
            session.close()


def test_the_documents_that_must_be_run_are() -> None:
    names = {name_of(document) for document in RUN}
    guides = {f"docs/guides/{name}" for name in os.listdir(ROOT / "docs/guides")}
    assert {"README.md", *guides} - MADE - ELSEWHERE <= names


# The tests above would be worth nothing if they could not fail.


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```console\n$ echo one\ntwo\n```", "did not show:\ntwo"),
        ("```console\n$ printf 'b\\na\\n'\na\nb\n```", "did not show:\nb"),
        ("```console\n$ false\n```", "status 1"),
        ("```console\n$ headrace serve --no-such-option\n```", "status 2"),
        ("```python\nprint(1)\n```\n```text\n2\n```", "did not show:\n2"),
        ("```python\nraise SystemExit(3)\n```", "status 3"),
        ("```console\n$ curl -sf localhost:8000/v2/models/none/ready\n```", "status 22"),
    ],
)
def test_a_wrong_document_is_caught(text: str, complaint: str, session_server: Program, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=re.escape(complaint)):
        Session(tmp_path, {"8000": session_server.port}).follow(text)


def test_a_background_command_is_waited_for_and_ended(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time\ntime.sleep(0.3)\nprint('here', flush=True)\ntime.sleep(60)\n")
    session = Session(tmp_path, {})
    try:
        assert session.follow("```console\n$ python late.py &\nhere\n$ kill -TERM $!\n```") == 2
    finally:
        session.close()
    assert all(process.returncode is not None for process in session._background)


def test_dots_match_anything_and_nothing_else_does() -> None:
    assert first_missing(["a ... z", "...", "end"], ["a b c z", "more", "end"]) is None
    assert first_missing(["a ... z"], ["a b c z and more"]) == "a ... z"
    assert first_missing(["a.c"], ["abc"]) == "a.c"


def test_what_is_not_to_be_run_is_not(tmp_path: Path) -> None:
    assert Session(tmp_path, {}).follow("```sh\nexit 1\n```\n```python new/saved.py\n1 / 0\n```") == 0
    assert (tmp_path / "new/saved.py").read_text() == "1 / 0\n"
