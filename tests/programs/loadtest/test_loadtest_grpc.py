# SPDX-License-Identifier: Apache-2.0
"""gRPC lanes against real servers: answers, and every way not to get one."""

from __future__ import annotations

import time

import uvloop

from headrace.client import NO_RETRY
from headrace.client.sockets import Address
from headrace.client.transport import check_options
from headrace.net.grpc.services import Services
from headrace.programs.loadtest.connections import GrpcTarget
from headrace.programs.loadtest.loops import ClosedLoop, drive
from headrace.programs.loadtest.results import Recording
from support.ports import free_port
from support.serving import EchoCalls, echo_site, serving
from support.waiting import eventually

SERVICE = "inference.GRPCInferenceService"


class Calls(EchoCalls):
    def __init__(self, deed: str) -> None:
        super().__init__()
        self.deed = deed

    def add_to(self, services: Services) -> None:
        handlers = {"echo": lambda call, message: call.reply(message), "hold": self.hold, "refuse": self.refuses}
        services.unary(SERVICE, "ModelInfer", handlers[self.deed])


def run(port: int, *, workers: int = 2, seconds: float = 0.4, timeout: float = 30.0) -> Recording:
    async def main() -> Recording:
        options = check_options(
            timeout=30, retry=NO_RETRY, verify=True, cert=None, token="", headers={"x-a": "b"}, compression=None
        )
        target = GrpcTarget(Address.parse(f"grpc://127.0.0.1:{port}"), b"request", options)
        begun = time.perf_counter()
        recording = Recording(begun, begun + seconds)
        await drive(ClosedLoop(target, workers, recording), recording, timeout, lambda now: None)
        await target.close()
        return recording

    return uvloop.run(main())


def test_answers_count() -> None:
    with serving(echo_site(calls=Calls("echo"))) as server:
        result = run(server.port, workers=70)  # more than there are connections
    assert result.finished > 0
    assert not result.errors


def test_errors_have_the_name_of_their_code() -> None:
    with serving(echo_site(calls=Calls("refuse"))) as server:
        result = run(server.port)
    assert set(result.errors) == {"gRPC INVALID_ARGUMENT"}
    assert result.examples["gRPC INVALID_ARGUMENT"].startswith("not like that")


def test_a_call_without_an_answer_times_out_and_is_cancelled() -> None:
    calls = Calls("hold")
    with serving(echo_site(calls=calls)) as server:
        result = run(server.port, seconds=0.2, timeout=1.0)  # both have got there by then
        assert result.errors == {"timeout": 2}
        eventually(lambda: calls.events == ["cancel", "cancel"])


def test_an_unreachable_server_is_reported() -> None:
    result = run(free_port())
    assert set(result.errors) == {"no connection"}
