# SPDX-License-Identifier: Apache-2.0
"""`headrace bench` against a real server: every protocol, both loops, a sweep, plots, JSON, and invalid options."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ports import free_port
from support.programs import Program, run

pytestmark = pytest.mark.worker("matplotlib")

QUICK = ("--duration", "0.2", "--warm-up", "0.05", "--concurrency", "4")


def runs_of(*arguments: str | Path) -> list[dict[str, Any]]:
    done = run("bench", *arguments, "--json", "-")
    if done.returncode == 1:  # on a busy machine no request may succeed within a fifth of a second
        done = run("bench", *arguments, "--duration", "5", "--json", "-")
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


@pytest.mark.parametrize("protocol", ["http", "grpc", "predict"])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_protocol_reaches_the_model(session_server: Program, protocol: str, rows: int) -> None:
    url = session_server.grpc_url if protocol == "grpc" else session_server.url
    (found,) = runs_of("echo", "--url", url, "--protocol", protocol, "--rows", str(rows), *QUICK)
    assert found["errors"] == {}
    assert found["requests"] > 0
    # Each connection may have one request that began before the end and was answered after it.
    assert found["requests_per_second"] * 0.2 == pytest.approx(found["requests"], abs=4.1)
    times = found["latency_ms"]
    assert 0 < times["p50"] <= times["p90"] <= times["p95"] <= times["p99"] <= times["p99.9"] <= times["max"]
    assert found["server"]["rows"] == rows * found["server"]["requests"]
    assert sum(int(size) * count for size, count in found["server"]["batches"].items()) == found["server"]["rows"]
    assert 0 < found["client_cpu"]["thread"] <= 1.1


@pytest.mark.parametrize("protocol", ["http", "grpc", "predict"])
def test_texts_small_floats_and_several_inputs_are_made(session_server: Program, protocol: str) -> None:
    url = session_server.grpc_url if protocol == "grpc" else session_server.url
    (found,) = runs_of("pair", "--url", url, "--protocol", protocol, "--rows", "2", *QUICK)
    assert found["errors"] == {}
    assert found["requests"] > 0


def test_a_table_bars_and_the_servers_view_are_shown(session_server: Program) -> None:
    done = run("bench", "echo", "--url", session_server.url, *QUICK)
    assert done.returncode == 0
    assert "closed loop of 4 connections, 1 row per request, 0.2 s" in done.stdout
    assert "  P50" in done.stdout and "P99.9" in done.stdout
    assert "server: queue " in done.stdout and "batches: " in done.stdout
    assert "client: " in done.stdout
    assert re.search(r"^ +max +\S+ ms  █", done.stdout, re.MULTILINE)


def test_an_open_loop_sends_at_its_rate_and_reports_delays(session_server: Program) -> None:
    (found,) = runs_of(
        "echo", "--url", session_server.url, "--rate", "200", "--uniform", "--duration", "0.2", "--warm-up", "0.1"
    )
    assert found["mode"] == "open"
    assert found["requests"] == pytest.approx(40, abs=1)
    assert found["late_ms"]["p50"] >= 0
    done = run("bench", "echo", "--url", session_server.url, "--rate", "100", "--duration", "0.1", "--warm-up", "0")
    assert "sent behind schedule: p50" in done.stdout


def test_a_sweep_has_a_row_for_each_number_and_a_picture(session_server: Program, tmp_path: Path) -> None:
    picture, numbers = tmp_path / "sweep.png", tmp_path / "numbers.json"
    done = run(
        "bench", "echo", "--url", session_server.url, "--concurrency", "1,2,4", "--duration", "0.1", "--warm-up", "0",
        "--plot", picture, "--json", numbers,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [run["concurrency"] for run in json.loads(numbers.read_text())["runs"]] == [1, 2, 4]
    assert "Throughput and latency" in done.stdout
    assert "CONNECTIONS" in done.stdout


def test_errors_of_the_model_are_reported_before_the_load(session_server: Program) -> None:
    done = run("bench", "failing", "--url", session_server.url, *QUICK)
    assert done.returncode == 1
    assert "not today" in done.stderr
    assert "requests/s" not in done.stdout


def test_open_dimensions_need_a_size(session_server: Program) -> None:
    done = run("bench", "sizes", "--url", session_server.url, *QUICK)
    assert done.returncode == 2
    assert "--shape ids:16,2" in done.stderr
    for given in (["--shape", "ids:5,2"], ["--input", "ids=5,2"]):
        (found,) = runs_of("sizes", "--url", session_server.url, *given, *QUICK)
        assert found["errors"] == {}


@pytest.mark.parametrize("name", ["x.npy", "x.json"])
def test_inputs_come_from_files(session_server: Program, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    if name == "x.npy":
        np.save(file, values)
    else:
        file.write_text(json.dumps(values.tolist()))
    (found,) = runs_of("echo", "--url", session_server.url, "--input", f"INPUT0={file}", *QUICK)
    assert found["rows"] == 2
    assert found["errors"] == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("echo", "--rows", "9"), "at most 8"),
        (("sizes", "--rows", "2", "--shape", "ids:1,2"), "one request at a time"),
        (("echo", "--concurrency", "0"), "above 0"),
        (("echo", "--concurrency", "1.5"), "whole numbers"),
        (("echo", "--rate", "x"), "--rate 'x'"),
        (("echo", "--uniform"), "--rate"),
        (("echo", "--duration", "0"), "above 0"),
        (("echo", "--shape", "INPUT1:4"), "did you mean 'INPUT0'"),
        (("echo", "--shape", "INPUT0"), "NAME:SIZES"),
        (("echo", "--shape", "INPUT0:5"), "does not fit"),
        (("echo", "--protocol", "grpc"), "grpc://"),
        (("echo", "--protocol", "soap"), "http, grpc or predict"),
        (("echo", "--plot", "x.jpg"), ".png"),
        (("echo", "--plot", "/nowhere/x.png"), "no such folder"),
        (("echo", "--json", "/nowhere/x.json"), "no such folder"),
        (("echo", "--header", "x"), "NAME:VALUE"),
        (("echo", "--key", "x"), "--cert"),
    ],
)
def test_what_makes_no_sense_is_refused(session_server: Program, arguments: tuple[str, ...], said: str) -> None:
    done = run("bench", *arguments, "--url", session_server.url)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_model_or_server_is_reported(session_server: Program) -> None:
    assert run("bench", "nothing", "--url", session_server.url).returncode == 1
    done = run("bench", "echo", "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert "no server answers" in done.stderr


def test_without_matplotlib_it_says_how_to_get_it(session_server: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("bench", "echo", "--url", session_server.url, "--plot", "x.png")
    assert done.returncode == 2
    assert "headrace[plot]" in done.stderr


def test_help_has_examples() -> None:
    assert "headrace bench resnet50 --rate 500" in run("bench", "--help").stdout
