# SPDX-License-Identifier: Apache-2.0
"""The life of the engine behind a model: it starts or does not, dies, is started again, and ends with its children."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from backends.openai_proxy.proxy_server import (
    FAKE,
    Proxied,
    alive,
    chat,
    command,
    fake_engine,
    proxied,
    stats_of,
    write_fake,
    write_model,
)

from headrace.backends.contract import Placement
from headrace.backends.openai_proxy import engine as engine_module
from headrace.backends.restart_backoff import Backoff
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.engine.repository.states import State
from support.ports import free_port
from support.programs import Program
from support.waiting import eventually


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """An engine that dies is started again at once."""
    monkeypatch.setattr(engine_module, "Backoff", lambda delays, **more: Backoff((0.01, 0.02), **more))
    (tmp_path / "models").mkdir()
    with proxied(tmp_path / "models") as running:
        yield running
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            left += [child] if child.status() != "zombie" and str(FAKE) in child.cmdline() else []
    assert not left, "an engine has outlived its server"


def test_an_engine_that_exits_at_start_is_reported_with_its_last_lines(served: Proxied) -> None:
    write_model(served.repository, "m", command=command("--exit", "3"))
    with pytest.raises(FailedPrecondition) as caught:
        served.load("m")
    assert "exit code 3" in caught.value.message
    assert "fake engine: loading weights | CUDA out of memory: tried to allocate 80 GiB" in caught.value.message
    assert served.state("m")[0] is State.UNAVAILABLE


@pytest.mark.slow  # quick: test_a_remote_engine_that_never_gets_healthy_is_reported, test_one_that_does_not_listen_is_killed
def test_an_engine_that_never_gets_healthy_is_stopped_and_reported(served: Proxied) -> None:
    write_fake(served.repository, "m", "--never-healthy", start_seconds="10")
    with pytest.raises(FailedPrecondition) as caught:
        served.load("m")
    assert "within 10 seconds: it answers /health with status 503" in caught.value.message
    assert "start_seconds" in caught.value.message and "fake engine: listening" in caught.value.message
    assert stats_of(served.port("m")) is None


def test_a_remote_engine_that_never_gets_healthy_is_reported(served: Proxied) -> None:
    port = free_port()
    with fake_engine(port, "--never-healthy"):
        write_model(served.repository, "m", url=f"http://127.0.0.1:{port}", start_seconds="1")
        with pytest.raises(FailedPrecondition, match="within 1 seconds: it answers /health with status 503"):
            served.load("m")


def test_a_command_that_cannot_be_executed_is_reported(served: Proxied, tmp_path: Path) -> None:
    write_model(served.repository, "gone", command='["no-such-engine", "{port}"]')
    with pytest.raises(FailedPrecondition, match=r"'no-such-engine'.*install it"):
        served.load("gone")
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    write_model(served.repository, "broken", command=f'["{script}", "{{port}}"]')
    with pytest.raises(FailedPrecondition, match=r"exit code 127.*cannot start"):
        served.load("broken")


def test_it_is_started_again_when_it_dies(served: Proxied) -> None:
    write_fake(served.repository, "m")
    served.load("m")
    first = served.stats("m")["pid"]
    others = [served.begin(chat("m", "hang on")) for _ in range(3)]
    for other in others:
        served.until(other, lambda entry: bool(entry.answers))
    answer = served.ask(chat("m", "die now"))  # it kills itself after the first word
    assert len(answer.answers) == 1
    for item in (answer, *(served.until(other, lambda _: False) for other in others)):
        assert isinstance(item.error, Unavailable)
        assert "died (signal 9" in item.error.message or "in the middle of its response" in item.error.message
    down = eventually(lambda: _down(served), message="requests are told what happened")
    assert "died (signal 9" in down.message and "started again" in down.message
    assert down.retry_after_seconds == 1
    eventually(lambda: _answers(served), message="there is a new engine")
    assert served.stats("m")["pid"] != first
    assert served.state("m") == (State.READY, "")


def _down(served: Proxied) -> Any:
    answer = served.ask(chat("m", "hello"))
    return (
        answer.error if isinstance(answer.received[-1][0], HeadraceError) and "died" in answer.error.message else None
    )


def _answers(served: Proxied, text: str = "hello") -> bool:
    answer = served.ask(chat("m", text))
    return not isinstance(answer.received[-1][0], HeadraceError) and answer.text == text


def test_one_that_cannot_start_again_is_tried_again_and_again(served: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    script = served.repository.parent / "once.sh"
    script.write_text(f'test -e "$0.ran" && exit 9\ntouch "$0.ran"\nexec {sys.executable} {FAKE} --port $1\n')
    write_model(served.repository, "m", command=f'["sh", "{script}", "{{port}}"]')
    served.load("m")
    assert isinstance(served.ask(chat("m", "die now")).error, Unavailable)
    reported = eventually(lambda: _exit_code(served), message="the second try has failed")
    assert "ended before it was healthy (exit code 9)" in reported.message and "being started again" in reported.message
    Path(f"{script}.ran").unlink()
    eventually(lambda: _answers(served), message="it starts again")


def _exit_code(served: Proxied) -> Any:
    answer = served.ask(chat("m", "hello"))
    return answer.error if "exit code 9" in getattr(answer.received[-1][0], "message", "") else None


def test_unload_ends_it_with_its_children(served: Proxied, tmp_path: Path) -> None:
    write_fake(served.repository, "m", "--grandchild", str(tmp_path / "workers"))
    served.load("m")
    pid, worker = served.stats("m")["pid"], int((tmp_path / "workers").read_text())
    assert alive(pid) and alive(worker)
    assert os.getsid(pid) == pid  # a session of its own: ctrl-c at the server's terminal is not for it
    served.unload("m")
    assert not alive(pid)
    eventually(lambda: not alive(worker), message="its children are gone")


def test_its_children_end_when_it_is_killed(served: Proxied, tmp_path: Path) -> None:
    write_fake(served.repository, "m", "--grandchild", str(tmp_path / "workers"))
    served.load("m")
    worker = int((tmp_path / "workers").read_text())
    os.kill(served.stats("m")["pid"], signal.SIGKILL)
    eventually(lambda: not alive(worker), message="its children are gone")


def test_one_that_does_not_listen_is_killed(served: Proxied) -> None:
    write_fake(served.repository, "m", "--deaf", stop_seconds="1")
    served.load("m")
    pid = served.stats("m")["pid"]
    began = time.monotonic()
    served.unload("m")
    assert not alive(pid)
    assert time.monotonic() - began > 0.9


def test_closing_an_instance_fails_waiting_requests(served: Proxied) -> None:
    write_fake(served.repository, "m")
    served.load("m")
    streaming = served.begin(chat("m", "hang on"))
    served.until(streaming, lambda item: bool(item.answers))
    version = served.plane.find("m")
    assert version is not None
    served.wait(version.retire(0.1))  # no more patience
    error = served.until(streaming, lambda _: False).error
    assert isinstance(error, Unavailable) and "being unloaded" in error.message


def test_an_instance_on_a_gpu_sees_only_that_gpu(served: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    write_fake(served.repository, "m")
    served.load("m")
    assert served.stats("m")["gpus"] == "GPU-a, GPU-b"
    instance = _instance_beside(served, Placement("m_0_gpu1", "gpu", 1))
    try:
        assert served.stats("m")["gpus"] == "GPU-b"
    finally:
        instance.close()


def _instance_beside(served: Proxied, placement: Placement) -> Any:
    """Another instance of the model, as the engine would open it."""
    model, instance = served.opened("m")
    instance.close()
    return model.open(placement)


def test_a_server_that_closes_does_not_wait_for_a_start(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    write_fake(repository, "m", "--never-healthy")
    with proxied(repository) as served:
        loading = asyncio.run_coroutine_threadsafe(served.plane.load("m"), served._loop)
        eventually(lambda: (tmp_path / "models.m.port").exists(), message="the engine has begun to start")
        pid = eventually(lambda: served.stats("m"), message="it listens")["pid"]
    assert loading.exception(30) is not None
    eventually(lambda: not alive(pid), message="the engine is gone")
    gc.collect()  # its process was waited for, or this complains


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_it_ends_with_a_server_that_is_killed_or_stopped(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "models").mkdir()
    write_fake(tmp_path / "models", "m")
    options = ("--http-port", "0", "--grpc-port", "0", "--grace-seconds", "1")
    server = Program("serve", tmp_path / "models", *options, log=tmp_path / "log", ready="model(s)").start()
    try:
        stats = stats_of(int((tmp_path / "models.m.port").read_text()))
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/v2/models/m/generate", b'{"text_input": "a b"}'), timeout=30
        ) as answer:
            assert json.load(answer)["text_output"] == "a b"
        server.send(number)
        assert server.wait() == (-9 if number is signal.SIGKILL else 0), server.log
        eventually(lambda: not alive(stats["pid"]), message="the engine has gone with it")
    finally:
        server.kill()
    assert "m_0_cpu: fake engine: listening" in server.log  # what it writes is in the server's log


def test_an_engine_elsewhere_is_reached_by_its_url(served: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    with fake_engine(port, "--key", "s3cret", "--no-health"):
        write_model(served.repository, "m", url=f"http://127.0.0.1:{port}/v1", api_key_env="ENGINE_KEY")
        served.load("m")
        assert served.ask(chat("m", "hello there")).text == "hello there"
        write_model(
            served.repository, "named", url=f"http://localhost:{port}", api_key_env="ENGINE_KEY", served_model="x"
        )
        served.load("named")
        assert "`x` does not exist" in served.ask(chat("named", "hello")).error.message
        streaming = served.begin(chat("m", "hang on"))
        served.until(streaming, lambda item: bool(item.answers))
    error = served.until(streaming, lambda _: False).error
    assert isinstance(error, Unavailable) and "in the middle of its response" in error.message
    error = served.ask(chat("m", "hello")).error
    assert isinstance(error, Unavailable) and "cannot be reached" in error.message
    with fake_engine(port, "--key", "s3cret"):
        eventually(lambda: _answers(served, "back again"))  # it may have been found ill meanwhile
        served.unload("m")
        assert stats_of(port) is not None  # it is not ours to end
    with fake_engine(port, "--key", "another"):
        write_model(served.repository, "refused", url=f"http://127.0.0.1:{port}", api_key_env="ENGINE_KEY")
        served.load("refused")  # its health needs no key
        error = served.ask(chat("refused", "hello")).error
        assert isinstance(error, Unavailable) and "api_key_env" in error.message and "s3cret" not in error.message


def test_an_unreachable_url_is_reported(served: Proxied) -> None:
    write_model(served.repository, "m", url=f"http://127.0.0.1:{free_port()}", start_seconds="1")
    with pytest.raises(FailedPrecondition, match=r"not healthy within 1 seconds: it cannot be reached"):
        served.load("m")


def test_one_that_falls_ill_gets_no_requests_until_it_is_well(served: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_SECONDS", 0.05)
    port = free_port()
    write_model(served.repository, "m", url=f"http://127.0.0.1:{port}")
    with fake_engine(port):
        served.load("m")
    with fake_engine(port, "--never-healthy"):
        error = eventually(lambda: _ill(served), message="requests are refused")
        assert "answers /health with status 503" in error.message
    with fake_engine(port):
        eventually(lambda: _answers(served), message="it is well again")


def _ill(served: Proxied) -> Any:
    answer = served.ask(chat("m", "hello"))
    return answer.error if "with status 503" in getattr(answer.received[-1][0], "message", "") else None
