# SPDX-License-Identifier: Apache-2.0
"""A Python model that wants more memory than there is: told to who asked, whether Python notices or the kernel does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from chaos_clients import CLIENTS, Client, Cut, ErrorAnswer
from chaos_server import PYTHON, add_model, chaos_models, served
from load_clients import LoadClients

from support.waiting import eventually

pytestmark = pytest.mark.slow

# Four gigabytes of addresses: enough to start, less than a hungry request wants. The number sent says what to do.
GREEDY = """
import os, resource, signal
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if array[0, 0] == 1:
                np.ones(1 << 32, np.float64)
            if array[0, 0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when it is the whole machine's memory
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
"""


@pytest.mark.timeout(300)
def test_the_caller_gets_an_error_and_other_requests_continue(tmp_path: Path) -> None:
    models = chaos_models(tmp_path)
    add_model(models, "greedy", PYTHON, GREEDY)
    with served(models, tmp_path / "log") as server, LoadClients(server.ports) as clients:
        clients.wait_for(5)
        for number, words in ((1, "memory"), (2, "died")):
            for protocol in ("v2 http", "predict", "v1 grpc"):
                client = CLIENTS[protocol](server.ports, "greedy")
                with pytest.raises((ErrorAnswer, Cut)) as refused:
                    client.ask(number)
                assert words in str(refused.value).lower() or "internal" in str(refused.value).lower(), refused.value
                client.close()
                second = CLIENTS[protocol](server.ports, "greedy")
                assert answered(second, 7) == 7
                second.close()
        clients.wait_for(5)
    clients.check()
    assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
        f"{clients.texts('error_answers')} {clients.texts('cut')}"
    )


def answered(client: Client, value: int) -> int:
    """The answer, once the model's process is back: until then its clients are told to try again."""

    def ask() -> int | None:
        with contextlib.suppress(ErrorAnswer, Cut):  # gRPC's word for it, UNAVAILABLE, counts as cut
            return client.ask(value)
        return None

    return int(eventually(ask))
