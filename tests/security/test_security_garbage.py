# SPDX-License-Identifier: Apache-2.0
"""Bodies that are none (tests 3 and 6), on every route of the microservice, the router and the webhooks that takes one.

The inference server's routes are tried by `tests/api/test_bad_input_corpus.py`, the gateway's by
`tests/jobs/api/test_jobs_schemathesis.py`, those of a machine's fleet by `test_security_fleet`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import routes_and_rights as rights
from bad_inputs import WRONG_TENSORS
from raw_requests import ask
from routing import routing
from surfaces import fleet_servers, microservice_routes

from headrace.fleet.cluster.webhooks.reviews import REVIEW_VERSION, ClusterSnapshot
from headrace.fleet.documents import ClusterFacts
from headrace.jobs.microservice.service import Microservice
from headrace.net.site import Site
from support.serving import serving


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


BODIES: dict[str, bytes] = {
    "nothing": b"", "half": b'{"a":', "bytes": bytes(range(256)) * 8, "a list": b"[]", "a number": b"1", "null": b"null",
    "deep": nested(100_000), "deep mappings": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a long number": b"9" * 5000, "NaN": b'{"model": NaN, "body": NaN}',
    "half a pair": b'{"model":"\\ud800","path":"\\ud800"}',
    "wrong members": b'{"path": 5, "headers": [], "body": {}, "method": null, "messages": "x", "input": {}}',
    "deep members": b'{"path":"/v1/chat/completions","model":"x","input":%b,"messages":%b,"body":%b}' % ((nested(900),) * 3),
    **{
        f"tensors: {name}": item if isinstance(item, bytes) else json.dumps(item).encode()
        for name, item in WRONG_TENSORS.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[int, str]]]:
    folder: Path = tmp_path_factory.mktemp("garbage")
    sight = ClusterSnapshot(ClusterFacts(), complete=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Microservice, "not_ready_response", lambda self: None)
        site = fleet_servers(folder, sight)["webhooks"].site
        with (
            serving(lambda: Site(microservice_routes(folder))) as microservice,
            serving(lambda: Site(site.routes, limits=site.limits)) as reviewing,
            routing("http://127.0.0.1:1") as router,
        ):
            yield [
                (port, route.split(" ")[1])
                for port, table in (
                    (microservice.port, rights.MICROSERVICE),
                    (reviewing.port, rights.WEBHOOKS),
                    (router.port, rights.ROUTER),
                )
                for route in rights.by_route(table)
                if route.startswith("POST ")
            ]


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_garbage_is_refused_with_a_reason(programs: list[tuple[int, str]], body: bytes) -> None:
    assert len(programs) > 10
    for port, path in programs:
        answer = ask(port, "POST", path, body, (b"content-type: application/json",))
        # 503: the microservice has no model here, which it may say first.
        assert answer.status in (200, 400, 404, 413, 422, 503), (path, answer)
        assert b"Traceback" not in answer.body and len(answer.body) < 8192, (path, answer)


@pytest.mark.parametrize("depth", [100, 400, 700, 900])
def test_reviews_of_documents_that_are_nested_deeply(programs: list[tuple[int, str]], depth: int) -> None:
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    for port, path in programs:
        if "ome-io" in path:
            kind = path.rsplit("-", 1)[1]
            document = {
                "apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": {"name": "x"},
                "spec": {"engine": {"affinity": deep}, "model": {"name": "m"}, "containers": [{"lifecycle": deep}]},
            }  # fmt: skip
            review = {
                "apiVersion": REVIEW_VERSION,
                "kind": "AdmissionReview",
                "request": {"uid": "u", "object": document},
            }
            answer = ask(port, "POST", path, json.dumps(review).encode())
            assert answer.status in (200, 400), (path, answer)
