# SPDX-License-Identifier: Apache-2.0
"""Numbers that are too large, too small or none (test 5), in every query and body of the gateway.

Those of inference requests are tried by `tests/api/test_bad_input_corpus.py`, `tests/api/openai/test_openai_bad.py` and
`tests/language_models/test_lm_bad_input.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import routes_and_rights as rights
from job_api import Api, job_api
from surfaces import gateway_path

NUMBERS = [
    "-1",
    "0",
    "1.5",
    "1e400",
    "NaN",
    "Infinity",
    str(2**31),
    str(2**63),
    str(2**64),
    "9" * 5000,
    "0x10",
    "٣",
    "",
]
QUERY = ("skip", "size", "limit", "offset", "tail", "lines", "page", "per_page", "timeout")
FIELDS = ("num_gpu", "num_gpus", "num_nodes", "timeout", "idle_timeout_minutes", "priority", "batch_size", "max_items",
          "max_failures", "experiment_number", "retain_checkpoints_for_resume", "early_stop_epoch")  # fmt: skip


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(None, tmp_path_factory.mktemp("numbers")) as api:
        yield api


@pytest.fixture(scope="module")
def token(gateway: Api) -> str:
    return gateway.login("root")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12] or "nothing")
def test_in_queries(gateway: Api, token: str, number: str) -> None:
    query = "&".join(f"{name}={quote(number)}" for name in QUERY)
    for route in rights.by_route(rights.GATEWAY):
        method, path = route.split(" ")
        if method == "GET":
            got = gateway.ask("GET", f"{gateway_path(path)}?{query}", token=token)
            assert got.status < 500, (route, got.body)
            assert len(got.body) < 1000 or "/orgs/" not in path, route


@pytest.mark.parametrize("number", [*NUMBERS[:10], "true", "null", "[]", "{}", '"1"'], ids=lambda number: number[:12])
def test_in_bodies(gateway: Api, token: str, number: str) -> None:
    specs = ",".join(f'"{name}":{number}' for name in FIELDS)
    body = f'{{{specs},"specs":{{{specs}}},"action":"batch","name":"x"}}'.encode()
    for route in rights.by_route(rights.GATEWAY):
        method, path = route.split(" ")
        if method in ("POST", "PUT", "PATCH") and "log" not in path:
            got = gateway.ask(method, gateway_path(path), body, token)
            assert got.status < 500 or got.status == 503, (route, got.body)
            assert isinstance(json.loads(got.body), (dict, list, str)), route
