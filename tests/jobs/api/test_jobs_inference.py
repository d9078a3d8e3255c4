# SPDX-License-Identifier: Apache-2.0
"""Inference through the gateway: passed on and back as it is, and what is said when nobody is there to ask."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from job_api import EXPERIMENT, INFERENCE, JOB, ORG, V2_INFERENCE, Api, StandInJobs, job_api

from headrace.jobs.settings import JobsApiSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.ports import free_port
from support.serving import Serving, serving
from support.waiting import eventually

LOADING = {"job_id": JOB, "status": "loading", "message": "Model is currently loading, please wait and try again"}
FAILED = {"job_id": JOB, "status": "error", "error": "Model failed to load: CUDA out of memory"}
NOT_READY = {"job_id": JOB, "status": "not_ready", "message": "Model not loaded yet, please try again later"}


class FakeService:
    """A service: what it answers is set by a test, what it was sent is kept."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, dict[bytes, bytes], bytes]] = []
        self.answer: tuple[int, Any] = (200, {"status": "completed", "results": {}})
        self.held: list[Exchange] = []
        self.gone = threading.Event()

    def site(self) -> Site:
        routes = Routes()
        routes.add("POST", "/api/v1/inference", self.infer)
        return Site(routes)

    def infer(self, exchange: Exchange) -> None:
        self.seen.append((exchange.head.path, dict(exchange.head.fields), bytes(exchange.body)))
        status, body = self.answer
        if body == "stream":
            exchange.start(OK_JSON)
            for number in range(3):
                exchange.send(b"piece %d\n" % number)
            exchange.finish()
        elif body == "hold":
            exchange.on_disconnect = self.gone.set
            self.held.append(exchange)
        else:
            exchange.respond(ResponseHead(status, [(b"content-type", b"application/json")]), json.dumps(body).encode())


@contextmanager
def gateway(
    folder: Path, settings: JobsApiSettings | None = None
) -> Iterator[tuple[Api, StandInJobs, FakeService, Serving]]:
    behind, jobs = FakeService(), StandInJobs()
    with serving(behind.site) as server, job_api(jobs, folder, settings) as api:
        jobs.url = f"http://127.0.0.1:{server.port}"
        yield api, jobs, behind, server


class Shared:
    """One gateway for most tests, each of which finds it as new."""

    def __init__(self, api: Api, jobs: StandInJobs, behind: FakeService, server: Serving) -> None:
        self._all = api, jobs, behind, server

    @contextmanager
    def fresh(self) -> Iterator[tuple[Api, StandInJobs, FakeService, Serving]]:
        api, jobs, behind, server = self._all
        jobs.__init__()  # type: ignore[misc]
        behind.__init__()  # type: ignore[misc]
        jobs.url = f"http://127.0.0.1:{server.port}"
        api.server.call(api.http.connections.close_job, JOB)
        yield self._all


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with gateway(tmp_path_factory.mktemp("inference")) as made:
        yield Shared(*made)


def test_a_request_is_forwarded_without_the_token_and_its_answer_returned(shared: Shared) -> None:
    with shared.fresh() as (api, _, behind, _server):
        token = api.login("alice")
        got = api.ask("POST", INFERENCE, {"media": "s3://b/x.jpg"}, token)
        assert (got.status, got.json) == (200, {"status": "completed", "results": {}})
        path, fields, body = behind.seen[0]
        assert (path, json.loads(body)) == (b"/api/v1/inference", {"media": "s3://b/x.jpg"})
        assert b"authorization" not in fields
        assert token.encode() not in repr(behind.seen).encode()


@pytest.mark.parametrize(
    ("status", "body", "v2"),
    [(202, LOADING, 200), (503, FAILED, 500), (503, NOT_READY, 200), (400, {"error": "no"}, 400)],
)
def test_states_pass_through_on_v1_and_are_flattened_on_v2(shared: Shared, status: int, body: Any, v2: int) -> None:
    with shared.fresh() as (api, _, behind, _server):
        behind.answer = (status, body)
        token = api.login("alice")
        got = api.ask("POST", INFERENCE, {"a": 1}, token)
        assert (got.status, got.json) == (status, body)
        got = api.ask("POST", V2_INFERENCE, {"a": 1}, token)
        assert (got.status, got.json) == (v2, body)


def test_a_streamed_answer_and_a_long_body_pass(shared: Shared) -> None:
    with shared.fresh() as (api, _, behind, _server):
        token = api.login("alice")
        behind.answer = (200, "stream")
        got = api.ask("POST", INFERENCE, {"a": 1}, token)
        assert (got.status, got.body) == (200, b"piece 0\npiece 1\npiece 2\n")
        behind.answer = (200, {"ok": True})
        long = json.dumps({"media": "x" * 3_000_000}).encode()
        assert api.ask("POST", INFERENCE, long, token).json == {"ok": True}
        assert behind.seen[-1][2] == long


def test_a_body_without_a_length_passes(shared: Shared) -> None:
    with shared.fresh() as (api, _, behind, _server):
        token = api.login("alice")
        for _ in range(3):  # the second time by a connection that is there already
            with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
                head = f"POST {INFERENCE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
                sock.sendall(f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
                sock.sendall(b'7\r\n{"a":1}\r\n0\r\n\r\n')
                answer = b"".join(iter(lambda: sock.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert behind.seen[-1][2] == b'{"a":1}'


def test_a_service_that_starts_or_failed_is_answered_for(shared: Shared) -> None:
    with shared.fresh() as (api, jobs, behind, _server):
        token = api.login("alice")
        jobs.state = "initializing"
        got = api.ask("POST", INFERENCE, {"a": 1}, token)
        message = "Server is initializing (downloading files, setting up), please wait"
        assert (got.status, got.json) == (202, {"job_id": JOB, "status": "initializing", "message": message})
        assert got.fields["retry-after"] == "5"
        assert api.ask("POST", V2_INFERENCE, {"a": 1}, token).status == 200
        jobs.state, jobs.error = "failed", "Server initialization failed: network timeout downloading model files"
        got = api.ask("POST", INFERENCE, {"a": 1}, token)
        assert (got.status, got.json) == (503, {"job_id": JOB, "status": "error", "error": jobs.error})
        assert api.ask("POST", V2_INFERENCE, {"a": 1}, token).status == 500
        assert not behind.seen


def test_a_service_that_does_not_listen_yet_is_initializing(shared: Shared) -> None:
    with shared.fresh() as (api, jobs, _, _server):
        token = api.login("alice")
        jobs.url = f"http://127.0.0.1:{free_port()}"
        got = api.ask("POST", INFERENCE, {"a": 1}, token)  # it lives, says `jobs`, and does not listen
        assert (got.status, got.json["status"], got.json["job_id"]) == (202, "initializing", JOB)
        assert jobs.lost_jobs == [JOB]
        jobs.gone = True
        assert api.ask("POST", INFERENCE, {"a": 1}, token).status == 404


def test_a_service_that_dies_during_a_request_is_reported(shared: Shared) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def die() -> None:
            sock = listener.accept()[0]
            seen = b""
            while not seen.endswith(b"}"):  # all of it: who leaves something unread resets the connection
                seen += sock.recv(65536)
            sock.close()

        threading.Thread(target=die, daemon=True).start()
        with shared.fresh() as (api, jobs, _, _server):
            jobs.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            got = api.ask("POST", INFERENCE, {"a": 1}, api.login("alice"))
            assert (got.status, got.json["status"]) == (500, "error")
            assert "closed the connection" in got.json["error"]
            assert got.json["progress"]["stage"] == "error"
            assert {"message", "remaining_steps", "details"} <= got.json["progress"].keys()
            assert got.json["timestamp"]
            assert jobs.lost_jobs == [JOB]


def test_a_service_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with gateway(tmp_path, JobsApiSettings(inference_seconds=1)) as (api, _, behind, _server):
        behind.answer = (200, "hold")
        got = api.ask("POST", INFERENCE, {"a": 1}, api.login("alice"))
        assert (got.status, got.json["status"]) == (500, "error")
        assert "did not answer within 1 second" in got.json["error"]
        assert behind.gone.wait(30)


def test_one_service_takes_no_more_than_its_share(tmp_path: Path) -> None:
    with gateway(tmp_path, JobsApiSettings(concurrency=1)) as (api, _, behind, server):
        token = api.login("alice")
        behind.answer = (200, "hold")
        held: list[Any] = []
        thread = threading.Thread(target=lambda: held.append(api.ask("POST", INFERENCE, {"a": 1}, token)))
        thread.start()
        eventually(lambda: behind.held)
        got = api.ask("POST", INFERENCE, {"a": 2}, token)
        assert (got.status, got.json["error_code"], got.fields["retry-after"]) == (429, 1, "1")
        server.call(behind.held[0].respond, OK_JSON, b"{}")
        thread.join(30)
        assert held[0].status == 200
        behind.answer = (200, {})
        assert api.ask("POST", INFERENCE, {"a": 3}, token).status == 200


def test_a_client_that_disconnects_cancels_its_request(shared: Shared) -> None:
    with shared.fresh() as (api, _, behind, _server):
        behind.answer = (200, "hold")
        token = api.login("alice")
        with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
            head = f"POST {INFERENCE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}"
            sock.sendall(head.encode())
            eventually(lambda: behind.held)
        assert behind.gone.wait(30)
        eventually(lambda: api.server.call(lambda: api.http.connections.in_flight) == 0)


def test_the_usual_request_does_not_query_the_platform(tmp_path: Path) -> None:
    with gateway(tmp_path, JobsApiSettings(fresh_seconds=60)) as (api, jobs, behind, _server):
        token = api.login("alice")
        head = f"POST {INFERENCE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}"
        with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
            for number in range(20):
                sock.sendall(head.encode())
                assert sock.recv(65536).startswith(b"HTTP/1.1 200 "), number
        assert len(behind.seen) == 20
        assert jobs.asked == 1


def test_after_a_stop_there_is_no_service(tmp_path: Path) -> None:
    with gateway(tmp_path, JobsApiSettings(fresh_seconds=60)) as (api, _, behind, _server):
        token = api.login("alice")
        assert api.ask("POST", INFERENCE, {"a": 1}, token).status == 200
        stop = INFERENCE.replace("/inference_microservice/inference", "/inference_microservice/stop")
        got = api.ask("POST", stop, None, token)
        assert (got.status, got.json) == (
            200,
            {"status": "stopped", "message": "Inference microservice stopped successfully", "job_id": JOB},
        )
        got = api.ask("POST", INFERENCE, {"a": 1}, token)
        assert (got.status, got.json["error_code"]) == (404, 1)
        assert api.ask("POST", stop, None, token).status == 404
        assert len(behind.seen) == 1


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        (INFERENCE.replace(JOB, "nonsense"), 400, "Job ID passed is not a valid UUID"),
        (INFERENCE.replace(EXPERIMENT, "nonsense"), 400, "Experiment ID passed is not a valid UUID"),
        (INFERENCE.replace(f"/{ORG}/", "/a%20b/"), 400, "organisation"),
        (INFERENCE.replace(JOB, EXPERIMENT), 404, "no job"),
        (INFERENCE.replace(f"/{ORG}/", "/other/"), 404, "organisation"),
        (INFERENCE + "/more", 404, "unknown path"),
        ("/nothing", 404, "unknown path"),
    ],
)
def test_what_is_not_there(shared: Shared, path: str, status: int, text: str) -> None:
    with shared.fresh() as (api, _, behind, _server):
        got = api.ask("POST", path, {"a": 1}, api.login("alice"))
        assert (got.status, got.json["error_code"]) == (status, 1), got.body
        assert text in got.json["error_desc"]
        assert not behind.seen


def test_callers_without_the_right_are_refused(shared: Shared) -> None:
    with shared.fresh() as (api, _, behind, _server):
        got = api.ask("POST", INFERENCE, {"a": 1})
        assert (got.status, got.json) == (401, {"error_desc": "Unauthorized: missing token", "error_code": 1})
        assert got.fields["www-authenticate"] == "Bearer"
        assert api.ask("POST", INFERENCE, {"a": 1}, "eyJhbGciOiJub25lIn0.e30.").status == 401
        got = api.ask("POST", INFERENCE, {"a": 1}, api.login("victor"))
        assert (got.status, got.json["error_code"]) == (403, 2)
        got = api.ask("POST", INFERENCE, {"a": 1}, api.login("bob", "other"))
        assert got.status == 404
        assert api.ask("POST", INFERENCE, b"x" * 100_000, "nonsense").status == 401
        assert not behind.seen
        assert api.ask("POST", INFERENCE, {"a": 1}, api.keys["alice"]).status == 200  # a raw key is a token, too


def test_a_removed_user_is_out_within_a_moment(tmp_path: Path) -> None:
    with gateway(tmp_path, JobsApiSettings(fresh_seconds=60)) as (api, _, _behind, _server):
        token = api.login("alice")
        assert api.ask("POST", INFERENCE, {"a": 1}, token).status == 200
        api.server.call(api.access.users.remove, "alice")
        eventually(lambda: api.ask("POST", INFERENCE, {"a": 1}, token).status == 401)


def test_another_method_is_answered_with_the_allowed_ones(shared: Shared) -> None:
    with shared.fresh() as (api, _, _behind, _server):
        got = api.ask("GET", INFERENCE)
        assert (got.status, got.fields["allow"]) == (405, "POST")
        got = api.ask("PATCH", f"/api/v1/orgs/{ORG}/workspaces", {})
        assert (got.status, got.fields["allow"]) == (405, "DELETE, GET, HEAD, POST")
        assert got.json["error_code"] == 1
