# SPDX-License-Identifier: Apache-2.0
"""The documents are true: what they tell the reader to type works, and what they point to is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import unquote

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doc_blocks import ROOT, anchors_of, blocks_of, code_spans_of, documents, links_of, steps_of
from doc_session import Mismatch, Session, first_missing
from limits_table import GUIDE, limits_table, table_in
from support.ports import launchers_ports

from headrace.api.metrics.collector import _own_names
from headrace.backends.table import BACKENDS
from headrace.cli.flags_ignored import IGNORED

HEADRACE = Path(sys.executable).parent / "headrace"
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def runs_something(document: Path) -> bool:
    return any(block.language in ("console", "python") for block in blocks_of(document.read_text()))


def tools_of(document: Path) -> set[str]:
    """The programs beside our own that a document needs."""
    steps = [
        step for block in blocks_of(document.read_text()) if block.language == "console" for step in steps_of(block)
    ]
    words = {word for step in steps for word in re.findall(r"\w+", step.command)}
    return words & {"curl", "openssl", "pgrep"}


DOCUMENTS = documents()
MADE = {"docs/guides/serve-options.md", "docs/reference/commands.md"}
"""Tables made from the code, which tests beside that code compare with it."""
ELSEWHERE = {
    "docs/guides/kubernetes-services.md",
    "docs/guides/cloud-platforms.md",
    "docs/guides/slurm.md",
    "docs/guides/fleet-commands.md",
    "docs/guides/inference-services.md",
    "docs/guides/install-on-kubernetes.md",
    "docs/guides/model-agent.md",
    "docs/guides/local-fleet.md",
}
"""What they tell needs a cluster or an account; `tests/launch` tries it where there is one, or a stand-in."""
RUN = [document for document in DOCUMENTS if runs_something(document)]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server with the built-in models, on free ports."""
    with server_of(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def example_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """A server as `make serve` starts it, but on free ports."""
    folder = tmp_path_factory.mktemp("examples")
    models = folder / "models"
    subprocess.run([sys.executable, ROOT / "examples/make_models.py", models], check=True, capture_output=True)
    with server_of(folder, models) as found:
        yield found


@contextmanager
def server_of(folder: Path, *models: Path) -> Iterator[dict[str, int]]:
    log = folder / "log"
    with log.open("wb") as output:
        command = [HEADRACE, "serve", *models, "--http-port", "0", "--grpc-port", "0"]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "ready: " not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)  # the test's own time-out is the limit
            http, grpc = (int(number) for number in LISTENING.findall(log.read_text()))
            yield {"8000": http, "8001": grpc}
        finally:
            server.terminate()
            assert server.wait(180) == 0


@pytest.mark.timeout(600)  # a document may start several servers, and the machine may be busy
@pytest.mark.parametrize("document", RUN, ids=name_of)
def test_what_the_reader_is_told_to_do_works(document: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links_of(document.read_text()):
        if "://" in link:
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors_of(target.read_text()), f"{link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_named_in_the_text_exist(document: Path) -> None:
    roots = (ROOT, ROOT / "headrace", ROOT / "headrace/wire", document.parent)
    for span in code_spans_of(document.read_text()):
        if re.fullmatch(r"[\w./-]+\.(py|md|toml|proto|binpb|sh)", span) and "/" in span:
            assert any((root / span).exists() for root in roots), f"`{span}` does not exist"


VERBS = (
    "serve",
    "router",
    "router explain",
    "bench",
    "tune",
    "infer",
    "keys create",
    "ab set",
    "ab report",
    "config show",
    "models load",
    "microservice",
    "gateway",
    "batch",
    "users add",
    "jobs register",
    "explain",
    "doctor",
    "top",
    "completion",
    "operator run",
    "operator manifests",
    "model-agent",
    "up",
    "get",
    "describe",
    "apply",
    "delete",
    "rollout promote",
    "logs",
    "scale",
    "service start",
    "service request",
    "service stop",
    "service preflight",
)


def options_of(verb: str) -> set[str]:
    shown = subprocess.run(
        [HEADRACE, *verb.split(), "--help"],
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"--[a-z][a-z-]+", shown.stdout))


@pytest.fixture(scope="module")
def serve_options() -> set[str]:
    options = options_of("serve")
    assert "--http-port" in options
    return options


@pytest.fixture(scope="module")
def all_options(serve_options: set[str]) -> set[str]:
    return serve_options.union(*map(options_of, VERBS[1:]))


def alone_in(text: str) -> set[str]:
    """Options that stand alone `--like-this` in the prose."""
    text = text.replace(table_in(text), "")  # the table of limits names an option of another server
    return options_in(span for span in code_spans_of(text) if span.startswith("--"))


def options_in(commands: Iterable[str]) -> set[str]:
    return {option for command in commands for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", command)}


def options_to_serve_in(text: str) -> set[str]:
    """Options in commands with `headrace serve`."""
    commands = [span for span in code_spans_of(text) if span.startswith("headrace serve")]
    for block in blocks_of(text):
        if block.language in ("console", "sh"):
            lines = block.text.replace("\\\n", " ").splitlines()
            # `|| true` shows how something is refused.
            commands += [line for line in lines if "headrace serve" in line and not line.endswith("|| true")]
    return options_in(commands)


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each.name != "commands.md"], ids=name_of)
def test_options_exist(document: Path, serve_options: set[str], all_options: set[str]) -> None:
    text = document.read_text()
    taken = {f"--{option.name}" for option in IGNORED}
    assert options_to_serve_in(text) <= serve_options | taken
    assert alone_in(text) <= all_options | taken


def test_every_option_is_explained_somewhere(serve_options: set[str]) -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    named = {option for text in texts for option in alone_in(text) | options_to_serve_in(text)}
    assert serve_options - {"--help"} <= named


def test_the_table_of_limits_is_that_of_the_code() -> None:
    assert table_in(GUIDE.read_text()) == limits_table(), "run `python tests/docs/limits_table.py`"


def test_the_guide_to_metrics_names_what_a_scrape_has() -> None:
    """All of them, and none that is not there."""
    named = {
        span.partition("_bucket")[0]
        for span in code_spans_of((ROOT / "docs/guides/metrics.md").read_text())
        if re.fullmatch(r"(nv|process|python)_\w+", span)
    }
    told = {name for _, name in _own_names()}
    assert named == told


def test_the_table_of_formats_names_every_backend_and_real_tests() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("## Formats")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert {backend for row in rows for backend in re.findall(r"`(\w+)`", row.split("|")[2])} >= set(BACKENDS)
    for row in rows:
        tests = re.findall(r"`(test_\w+|cases/\w+)`", row)
        assert tests, row
        for test in tests:
            assert list((ROOT / "tests").glob(f"**/{test}.py")), f"{test}: {row}"


def test_the_bench_has_its_place_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert 0 < text.find("<!-- bench:start -->") < text.find("<!-- bench:end -->")


def test_the_changelog_begins_with_what_is_not_released() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"


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
def test_a_wrong_document_is_caught(text: str, complaint: str, ports: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=re.escape(complaint)):
        Session(tmp_path, ports).follow(text)


def test_a_background_command_is_waited_for_and_ended(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time\ntime.sleep(0.3)\nprint('here', flush=True)\ntime.sleep(60)\n")
    session = Session(tmp_path, {})
    try:
        assert session.follow("```console\n$ python late.py &\nhere\n$ kill -TERM $!\n```") == 2
    finally:
        session.close()
    assert all(process.returncode is not None for process in session._background)


def test_dots_stand_for_anything_and_nothing_else_does() -> None:
    assert first_missing(["a ... z", "...", "end"], ["a b c z", "more", "end"]) is None
    assert first_missing(["a ... z"], ["a b c z and more"]) == "a ... z"
    assert first_missing(["a.c"], ["abc"]) == "a.c"


def test_what_is_not_to_be_run_is_not(tmp_path: Path) -> None:
    assert Session(tmp_path, {}).follow("```sh\nexit 1\n```\n```python saved.py\n1 / 0\n```") == 0
    assert (tmp_path / "saved.py").read_text() == "1 / 0\n"


def test_options_are_found_in_commands_and_prose() -> None:
    text = (
        "see `--one` and `curl --two`\n```console\n$ headrace serve --three \\\n  --four 4\n$ curl --five\n"
        "$ headrace serve --six || true\n```\n"
    )
    assert alone_in(text) | options_to_serve_in(text) == {"--one", "--three", "--four"}


def test_links_and_headings_are_found() -> None:
    assert list(links_of("[a](b.md#c) `[d](e)`\n```sh\n[f](g)\n```\n")) == ["b.md#c"]
    assert anchors_of("# Two words, `and` code\n") == {"two-words-and-code"}
