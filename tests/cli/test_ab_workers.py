# SPDX-License-Identifier: Apache-2.0
"""`headrace ab` against `headrace serve --workers 2`: a failing version is rolled back in every worker."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.programs import Program, run
from support.servers import serve_process
from support.waiting import eventually

CONFIG = """backend: "python"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
version_policy { all { } }
parameters { key: "version_labels" value { string_value: "1=v1.0.0,2=v1.1.0" } }
"""
GOOD = "import numpy as np\ndef predict(INPUT0: np.ndarray) -> np.ndarray:\n    return INPUT0\n"
BAD = "import numpy as np\ndef predict(INPUT0: np.ndarray) -> np.ndarray:\n    raise RuntimeError('candidate')\n"
REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def make_model(folder: Path) -> Path:
    for number, text in ((1, GOOD), (2, BAD)):
        (folder / "m" / str(number)).mkdir(parents=True)
        (folder / "m" / str(number) / "model.py").write_text(text)
    (folder / "m" / "config.pbtxt").write_text(CONFIG)
    return folder


def ask(server: Program, path: str, document: Any = None, connection: http.client.HTTPConnection | None = None) -> Any:
    """On a connection of its own, which the kernel gives to any of the workers, unless there is one."""
    used = connection or http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        used.request("GET" if document is None else "POST", path, None if document is None else json.dumps(document))
        answer = used.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        if connection is None:
            used.close()


@pytest.mark.slow
def test_a_failing_candidate_is_rolled_back_in_all_workers(tmp_path: Path) -> None:
    with serve_process(tmp_path / "log", make_model(tmp_path / "models"), "--workers", "2") as server:
        eventually(lambda: len(set(re.findall(r'"worker":(\d)', server.log))) == 2)
        options = ("--rollback-error-rate", "0.2", "--rollback-least", "10", "--sticky-field", "user")
        done = run("ab", "set", "m", "v1.0.0=0.5", "v1.1.0=0.5", *options, "--url", server.url)
        assert done.returncode == 0, done.stderr
        seen: Counter[str] = Counter()

        def client(number: int) -> None:
            for step in range(40):
                user = {"parameters": {"user": f"{number}/{step}"}}
                status, answer = ask(server, "/v2/models/m/infer", {**REQUEST, **user})
                seen[answer["model_version"] if status == 200 else "failed"] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert seen.total() == 240 and seen["2"] == 0
        # Each worker may fail ten before it judges, and what was under way meanwhile.
        assert 10 <= seen["failed"] <= 2 * 10 + 6
        for _ in range(8):  # whoever is asked
            status, report = ask(server, "/admin/traffic/m/report")
            assert status == 200
            good, bad = report["versions"]
            assert (good["answered"], bad["errors"]) == (seen["1"], seen["failed"])
            assert bad["state"] == "rolled_back" and bad["effective_weight"] == 0
        assert {ask(server, "/v2/models/m/infer", REQUEST)[1]["model_version"] for _ in range(20)} == {"1"}
        shown = run("ab", "report", "m", "--url", server.url)
        assert shown.returncode == 0 and "rolled back" in shown.stdout and "fails more often" in shown.stdout
        metrics = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        metrics.request("GET", "/metrics")
        text = metrics.getresponse().read().decode()
        metrics.close()
        assert f'headrace_traffic_errors_total{{model="m",version="v1.1.0"}} {seen["failed"]}\n' in text
        assert run("ab", "clear", "m", "--url", server.url).returncode == 0
        assert {ask(server, "/admin/traffic/m")[0] for _ in range(8)} == {404}
