# SPDX-License-Identifier: Apache-2.0
"""Timelines over HTTP and gRPC: who may switch them on, what they say, and of all workers; and how far loads are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_models import write_identity, write_plain
from console_process import INFER, ask, console_server

from headrace.api.access.api_keys import create_key
from support.servers import serve_in_thread
from support.waiting import eventually

_SLOW = '''
import time
from pathlib import Path


class TritonPythonModel:
    """Starts when it is told to."""

    def initialize(self, args):
        while not Path({go!r}).exists():
            time.sleep(0.02)

    def execute(self, requests):
        return []
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models = write_plain(tmp_path_factory.mktemp("timeline_models"))
    with serve_in_thread(models) as running:
        yield running.url


def timelines(url: str) -> list[dict[str, Any]]:
    answer = ask(f"{url}/console/api/requests")
    assert answer.fields["cache-control"] == "no-store"
    requests: list[dict[str, Any]] = answer.json["requests"]
    return requests


def test_the_next_requests_of_a_model_are_recorded_from_first_byte_to_answer(server: str) -> None:
    assert ask(f"{server}/v2/models/echo/infer", INFER).status == 200
    reported = ask(f"{server}/console/api/requests", {"model": "echo", "requests": 2}).json
    assert reported["watching"]["echo"]["left"] == 2 and 0 < reported["watching"]["echo"]["seconds"] <= 60
    for name in ("one", "two", "three"):
        assert ask(f"{server}/v2/models/echo/infer", {"id": name, **INFER}).status == 200
    second, first = timelines(server)
    assert (first["id"], second["id"]) == ("one", "two")
    names = [phase["name"] for phase in first["phases"]]
    assert names[0] == "decoded" and names[-1] == "encoded and sent"
    assert {"queued", "computed"} <= set(names)
    assert first["batch"]["reason"] == "idle instance" and first["total_us"] > 0
    assert ask(f"{server}/console/api/requests").json["watching"] == {}


def test_a_call_over_grpc_is_one_too(tmp_path: Path) -> None:
    import numpy as np

    from headrace.client.client import Client

    write_identity(tmp_path / "models", "echo")
    with serve_in_thread(tmp_path / "models") as running:
        # Both ports speak all protocols.
        with Client(running.url.replace("http://", "grpc://")) as client:
            ask(f"{running.url}/console/api/requests", {"model": "echo", "requests": 1})
            client.infer("echo", {"INPUT0": np.ones((1, 4), np.float32)})
        (told,) = timelines(running.url)
        assert [told["phases"][0]["name"], told["phases"][-1]["name"]] == ["decoded", "encoded and sent"]


def test_an_invalid_request_is_refused_with_a_reason(server: str) -> None:
    wrong = ask(f"{server}/console/api/requests", {"model": "echo", "requests": 1000})
    assert wrong.status == 400 and "to 200" in wrong.json["error"]
    assert ask(f"{server}/console/api/requests", {"model": "none"}).status == 404


def test_a_page_of_others_cannot_switch_it_on(server: str) -> None:
    wish = {"model": "echo", "requests": 1}
    assert ask(f"{server}/console/api/requests", wish, origin="https://elsewhere.example").status == 403


def test_reading_needs_read_and_recording_needs_admin(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    reader = {"authorization": f"Bearer {create_key(keys, 'reader', ['read', 'infer'], created=0)}"}
    root = {"authorization": f"Bearer {create_key(keys, 'root', ['admin'], created=0)}"}
    write_identity(tmp_path / "models", "echo")
    with serve_in_thread(tmp_path / "models", "--api-keys-file", keys) as running:
        url = running.url
        wish = {"model": "echo", "requests": 1}
        assert ask(f"{url}/console/api/requests").status == 401
        assert ask(f"{url}/console/api/requests", **reader).status == 200
        assert ask(f"{url}/console/api/requests", wish, **reader).status == 403
        assert ask(f"{url}/console/api/requests", wish, **root).status == 200


@pytest.mark.slow
def test_all_workers_record_and_report(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "echo")
    with console_server(tmp_path / "log", tmp_path / "models", "--workers", "2", workers=2) as url:
        assert ask(f"{url}/console/api/requests", {"model": "echo", "requests": 40}).status == 200
        for number in range(40):
            assert ask(f"{url}/v2/models/echo/infer", {"id": f"r{number}", **INFER}).status == 200
        reported = timelines(url)
        assert {item["id"] for item in reported} == {f"r{number}" for number in range(40)}
        assert len({item["key"] for item in reported}) == 40
        began = [item["began"] for item in reported]
        assert began == sorted(began, reverse=True)


def test_live_has_the_progress_of_a_load(tmp_path: Path) -> None:
    models, go = tmp_path / "models", tmp_path / "go"
    write_identity(models, "echo")
    (models / "slow" / "1").mkdir(parents=True)
    (models / "slow" / "1" / "model.py").write_text(_SLOW.format(go=str(go)))
    config = (models / "echo" / "config.pbtxt").read_text()
    (models / "slow" / "config.pbtxt").write_text(config.replace('"echo"', '"slow"').replace('"identity"', '"python"'))
    explicit = ("--model-control-mode", "explicit", "--load-model", "echo")
    with serve_in_thread(models, *explicit) as running:
        url = running.url
        loading = threading.Thread(target=ask, args=(f"{url}/v2/repository/models/slow/load", {}))
        loading.start()

        def slow() -> dict[str, Any]:
            live = ask(f"{url}/console/api/live").json["models"]
            return next((item for item in live if item["name"] == "slow"), {})

        try:
            reported = eventually(
                lambda: slow() if "starting" in slow().get("progress", {}).get("message", "") else None
            )
            assert reported["state"] == "LOADING"
            assert (reported["progress"]["done"], reported["progress"]["total"]) == (1, 2)
        finally:
            go.touch()
            loading.join()
        ready = slow()
        assert ready["state"] == "READY" and "progress" not in ready
