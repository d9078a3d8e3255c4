# SPDX-License-Identifier: Apache-2.0
"""`headrace doctor` on this machine: with real ports, servers and folders."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.doctor import server_url
from headrace.core.errors import InvalidArgument
from headrace.programs.doctor.checks import HEADINGS
from headrace.programs.doctor.servers import check_gateway
from support.ports import free_port
from support.programs import Finished, Program, run
from support.servers import serve_in_thread
from support.tiny_models import BROKEN, CONFIG, make_models


def findings_of(done: Finished) -> dict[str, dict[str, str]]:
    """By name; that the exit code fits them is looked at as well."""
    document = json.loads(done.stdout)
    states = [finding["state"] for finding in document["findings"]]
    assert (states.count("problem"), states.count("warning")) == (document["problems"], document["warnings"])
    assert done.returncode == (1 if document["problems"] else 0), done.stderr
    assert all(finding["fix"] for finding in document["findings"] if finding["state"] == "problem")
    return {finding["name"]: finding for finding in document["findings"]}


def free_ports() -> list[str]:
    """So that what else runs on this machine does not matter."""
    return [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", str(free_port()))]


def test_ports_that_another_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = (item.getsockname()[1] for item in (taken, other))
        arguments = ["--http-port", str(port), *free_ports()[2:4], "--metrics-port", str(metrics)]
        findings = findings_of(run("doctor", *arguments, "--json"))
    reported = findings[f"port {port}"]
    assert reported["state"] == "problem" and f"process {os.getpid()}," in reported["message"]
    assert reported["fix"].startswith("headrace serve --http-port ")
    with socket.create_server(("127.0.0.1", int(reported["fix"].rpartition(" ")[2]))):
        pass  # the fix names a port that can be had
    # A server does without the port for metrics.
    assert findings[f"port {metrics}"]["state"] == "warning"


def test_a_server_that_runs(session_server: Program) -> None:
    server = session_server
    findings = findings_of(run("doctor", *free_ports()[2:], "--http-port", str(server.port), "--json"))
    named = findings_of(run("doctor", *free_ports(), "--url", server.url.removeprefix("http://"), "--json"))
    reported = findings[f"port {server.port}"]
    assert reported["state"] == "ok" and f"process {server.pid}," in reported["message"]
    for finding in (findings, named):
        assert finding[f"server {server.url}"]["state"] == "ok"
        assert finding[f"clock of {server.url}"]["state"] == "ok"


def test_a_server_that_is_not_ready(tmp_path: Path) -> None:
    with serve_in_thread(make_models(tmp_path / "models", fine=CONFIG, broken=BROKEN)) as server:
        findings = findings_of(run("doctor", *free_ports(), "--url", server.url, "--json"))
    reported = findings[f"server {server.url}"]
    assert reported["state"] == "problem" and "broken is" in reported["message"] and "dimms" in reported["message"]
    assert reported["fix"] == f"headrace models list --url {server.url}"


def test_server_unreachable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    findings = findings_of(run("doctor", *free_ports(), "--url", url, "--gateway", url, "--json"))
    for name in (f"server {url}", f"gateway {url}"):
        assert findings[name]["state"] == "problem" and "Connection refused" in findings[name]["message"]


@contextmanager
def answering(ahead: float) -> Iterator[str]:
    """Something that says it is ready, with a clock of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + ahead, usegmt=True)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("ahead", "state", "words"),
    [(0, "ok", "agrees"), (20, "warning", "ahead of"), (-20, "warning", "behind"), (-900, "problem", "behind")],
)
def test_the_clock_of_a_gateway(ahead: float, state: str, words: str) -> None:
    with answering(ahead) as url:
        gateway, clock = check_gateway(url, {})
    assert (gateway.name, gateway.state) == (f"gateway {url}", "ok")
    assert (clock.name, clock.state) == (f"clock of {url}", state) and words in clock.message


def test_lines_for_people_and_nothing_changed(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    environ = {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_STATE_HOME": "", "HEADRACE_STATE_DIR": ""}
    arguments = ["doctor", *free_ports(), "--repository", "nowhere"]
    done = run(*arguments, env=environ, cwd=here)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and not done.stderr
    assert lines[0].split()[:2] == ["problem", "repository"]
    assert lines[1] == "         try: mkdir -p nowhere"
    headings = [line for line in lines if line in (*HEADINGS, "Platforms")]
    # On a machine where every platform has something to say, none of them is in the rest.
    assert headings in ([*HEADINGS], [*HEADINGS, "Platforms"])
    states = [line.split()[0] for line in lines if line.startswith(("problem ", "warning ", "ok "))]
    assert states == sorted(states, key=["problem", "warning", "ok"].index)
    assert any(
        line.startswith("ok ") and f"{home}/.cache/headrace is created when it is needed" in line for line in lines
    )
    assert lines[-1].split()[1] == "problem(s)," and lines[-1].endswith(" fine")
    quiet = run(*arguments, "--quiet", env=environ, cwd=here)
    assert not any(line.startswith("ok ") for line in quiet.stdout.splitlines())
    assert not list(home.iterdir()) and not list(here.iterdir())


def test_checks_that_cannot_be_made() -> None:
    done = run("doctor", "--platform", "moon")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and not done.stdout
    for text in ("ftp://there", "http://there:port", "http://"):
        with pytest.raises(InvalidArgument, match="is not a server URL"):
            server_url(text)
    assert server_url("there:8000/") == "http://there:8000"


def test_requested_platforms_are_checked(tmp_path: Path) -> None:
    config = tmp_path / "config"
    environ = {"KUBECONFIG": str(config), "HOME": str(tmp_path), "XDG_STATE_HOME": "", "LEPTON_AUTH_TOKEN": ""}
    arguments = ["doctor", *free_ports(), "--kube", "--platform", "process", "--platform", "lepton", "--json"]
    findings = findings_of(run(*arguments, env=environ))
    assert findings["process"]["state"] == "ok" and not (tmp_path / ".local").exists()
    assert findings["lepton: LEPTON_AUTH_TOKEN"]["fix"] == "export LEPTON_AUTH_TOKEN=VALUE"
    wrong = [item for name, item in findings.items() if name.startswith("kubernetes")]
    assert [item["state"] for item in wrong] == ["problem"] and str(config) in wrong[0]["message"]
