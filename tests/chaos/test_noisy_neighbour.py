# SPDX-License-Identifier: Apache-2.0
"""One key asks ten times what a server can do, another one asks now and then: the quiet one is answered all the same."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from pathlib import Path

import pytest
from chaos_clients import PATIENCE_SECONDS
from chaos_server import add_model, served

from headrace.api.access.api_keys import create_key

pytestmark = pytest.mark.slow
QUIET_REQUESTS, NOISY_CLIENTS, IN_FLIGHT = 200, 24, 12
BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[7]}]}'
SLOW = """backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "sleep_milliseconds" value { string_value: "2" } }
"""


class Caller:
    """One connection with a key; counts what it is answered."""

    def __init__(self, port: int, key: str, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        self._fields = {"Authorization": f"Bearer {key}"}
        self._path = path
        self.statuses: Counter[int] = Counter()

    def ask(self) -> int:
        self._connection.request("POST", self._path, BODY, self._fields)
        answer = self._connection.getresponse()
        answer.read()
        self.statuses[answer.status] += 1
        return answer.status

    def close(self) -> None:
        self._connection.close()


@pytest.mark.timeout(300)
def test_the_quiet_one_is_answered(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    loud, soft = (create_key(keys, name, ["infer", "read"], created=0) for name in ("loud", "soft"))
    add_model(tmp_path / "models", "slow", SLOW)
    stop = threading.Event()
    options = ("--api-keys-file", str(keys), "--max-in-flight", str(IN_FLIGHT))
    with served(tmp_path / "models", tmp_path / "log", *options) as server:
        path = "/v2/models/slow/infer"
        noisy = [Caller(server.ports.http, loud, path) for _ in range(NOISY_CLIENTS)]
        quiet = Caller(server.ports.http, soft, path)

        def shout(caller: Caller) -> None:
            while not stop.is_set():
                if caller.ask() == 429:
                    stop.wait(0.01)  # far sooner than it is told to come back

        # It has asked within the last minute; one who has not may find the server full once, and a place from then on.
        assert quiet.ask() == 200
        threads = [threading.Thread(target=shout, args=(caller,), daemon=True) for caller in noisy]
        for thread in threads:
            thread.start()
        try:
            for _ in range(QUIET_REQUESTS):
                quiet.ask()
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_SECONDS)
            for caller in (quiet, *noisy):
                caller.close()
    request = sum((caller.statuses for caller in noisy), Counter[int]())
    assert set(request) == {200, 429} and set(quiet.statuses) <= {200, 429}
    assert quiet.statuses[200] >= 0.99 * QUIET_REQUESTS, (quiet.statuses, request)
    assert request.total() >= 10 * QUIET_REQUESTS, request
    assert request[200] > QUIET_REQUESTS, "the loud one is served as well"
    print(quiet.statuses, request)
