# SPDX-License-Identifier: Apache-2.0
"""The fleet of one machine as it runs, `headrace up`: the verbs of its socket and the calls of its page, asked badly.

Names (test 1), nesting (3), sizes (4), numbers (5), garbage (6), forged requests (12), the key in what others see (14),
accidents (15). Who may ask at all is in `test_security_authorisation` and
`tests/programs/console/test_fleet_console_http.py`.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import routes_and_rights as rights
from bad_inputs import NAMES
from raw_requests import Answer, ask
from surfaces import Fleet, fleet_up

from headrace.core.errors import INTERNAL_TEXT
from headrace.core.limits import Limits
from support.waiting import eventually

VERBS = ("info", "list", "get", "apply", "patch", "delete", "pods", "events", "progress", "facts", "logs", "scale",
         "replicas", "replica_metrics", "router_statuses", "woken")  # fmt: skip
SPEC = {"model": {"name": "m"}, "engine": {"minReplicas": 1}}
SERVICE: dict[str, Any] = {
    "apiVersion": "ome.io/v1beta1", "kind": "InferenceService", "metadata": {"name": "kept", "namespace": "default"},
    "spec": SPEC,
}  # fmt: skip
NUMBERS = ("-1", "0", "1.5", "1e400", "NaN", "-Infinity", str(2**31), str(2**63), str(2**64), "9" * 5000, "true", "null",
           "[]", "{}", '"1"')  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "canary").write_text("untouched")
    with fleet_up(folder) as running:
        assert running.verb("apply", json.dumps({"document": SERVICE}).encode()).status == 200
        yield running
        assert running.verb("get", json.dumps(asked("kept")).encode()).status == 200


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "InferenceService", "namespace": "default", "name": name, **more}


def assert_refused(answer: Answer, *where: object) -> None:
    assert answer.status in (400, 404, 409, 413), (where, answer)
    assert 0 < len(answer.body) < 4096 and b"Traceback" not in answer.body, (where, answer)


def test_all_verbs_are_tried(fleet: Fleet) -> None:
    from headrace.fleet.local.api_server import ApiServer
    from headrace.fleet.local.settings import LocalSettings

    nothing: Any = None
    control = ApiServer(LocalSettings(fleet.root), nothing, nothing, nothing, nothing, nothing)
    assert set(control._verbs) == set(VERBS)


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_no_name_leads_out_of_its_folder(fleet: Fleet, name: str) -> None:
    before = fleet.files()
    text = unquote(name, errors="replace")
    for kind, version in (("InferenceService", "ome.io/v1beta1"), ("ConfigMap", "v1"), ("Namespace", "v1")):
        for metadata in ({"name": text}, {"name": "x", "namespace": text}):
            if kind == "Namespace" and "namespace" in metadata:
                continue  # it has none, whatever is said
            document = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": SPEC}
            for verb in ("apply", "delete"):
                result = fleet.verb(verb, json.dumps({"document": document}).encode())
                if verb == "apply":
                    assert_refused(result, kind, metadata)
    for verb in ("get", "pods", "progress", "logs", "scale", "replicas", "patch"):
        for body in (asked(text), asked("kept", namespace=text), asked("kept", pod=text, container=text, kind=text)):
            result = fleet.verb(verb, json.dumps({**body, "replicas": 1, "component": text, "change": {}}).encode())
            assert result.status in (200, 400, 404), (verb, body, result)
            assert b"untouched" not in result.body and b"root:" not in result.body
    assert fleet.verb(name if name.isascii() else "x").status in (400, 404)
    for route in rights.by_route(rights.FLEET_CONSOLE):
        method, path = route.split(" ")
        for place in range(path.count("{}")):
            right = ["default", "kept"]
            right[place] = name
            target = path
            for item in right:
                target = target.replace("{}", item, 1)
            result = fleet.page(method, target, b"{}" if method == "POST" else b"")
            assert result.status in (400, 404), (method, target, result)
    assert fleet.files() == before


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
def test_numbers(fleet: Fleet, number: str) -> None:
    where = '"kind":"InferenceService","namespace":"default","name":"kept"'
    for verb in VERBS:
        for field in ("replicas", "tail", "known", "uids", "parts", "generation", "document", "change", "dry_run"):
            result = fleet.verb(verb, f'{{{where},"component":"engine","{field}":{number}}}'.encode())
            assert result.status in (200, 400, 404, 409), (verb, field, result)
    for parts in (f'{{"pull":{number}}}', f'{{"pull":{number},"load":1.5}}'):
        assert fleet.verb("woken", f'{{{where},"parts":{parts}}}'.encode()).status in (200, 400), parts
    for path in ("scale", "rollout"):
        body = f'{{"component":"engine","action":"promote","replicas":{number},"generation":{number}}}'.encode()
        result = fleet.page("POST", f"/console/api/services/default/kept/{path}", body)
        assert result.status in (200, 400, 404, 409), (path, result)
    result = fleet.page("GET", f"/console/api/services/default/kept/logs?tail={number}")
    assert result.status in (200, 400, 404), result


GARBAGE = {
    "nothing": b"", "no JSON": b"{", "a list": b"[]", "a number": b"5", "a text": b'"x"', "bytes": bytes(range(256)),
    "deep lists": b'{"document":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep mappings": b'{"change":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "half a pair": b'{"name":"\\ud800","document":{"metadata":{"name":"\\ud800"}}}',
    "twice": b'{"name":"a","name":"b"}',
    "nulls": json.dumps(dict.fromkeys(("document", "change", "uids", "known", "parts", "name", "kind"))).encode(),
    "lists": json.dumps(dict.fromkeys(("document", "change", "uids", "known", "parts", "name", "kind"), [[1]])).encode(),
}  # fmt: skip


@pytest.mark.parametrize("body", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage(fleet: Fleet, body: bytes) -> None:
    for verb in VERBS:
        result = fleet.verb(verb, body)
        assert result.status in (200, 400, 404), (verb, result)
    for path in ("scale", "rollout"):
        assert fleet.page("POST", f"/console/api/services/default/kept/{path}", body).status in (400, 404, 409), path


@pytest.mark.parametrize("depth", [50, 200, 400, 700, 900])
def test_a_deeply_nested_document_is_harmless(fleet: Fleet, depth: int) -> None:
    """As deep as JSON can be read: what follows goes as deep, with more on its way. Where documents hold what they like."""
    deep = f'{{"a":{"[" * depth}{"]" * depth}}}'
    ours = '"apiVersion":"ome.io/v1beta1","kind"'
    named = f'"metadata":{{"name":"deep-{depth}"}}'
    containers = f'[{{"name":"x","image":"x","lifecycle":{deep}}}]'
    for said in (
        f'"apiVersion":"v1","kind":"ConfigMap",{named},"data":{deep}',
        f'{ours}:"InferenceService",{named},"spec":{{"model":{{"name":"m"}},"engine":{{"affinity":{deep}}}}}',
        f'{ours}:"ClusterServingRuntime",{named},"spec":{{"supportedModelFormats":[],"containers":{containers}}}',
    ):
        result = fleet.verb("apply", f'{{"document":{{{said}}}}}'.encode())
        assert result.status in (200, 400), (said[:80], result)
        if result.status == 200:
            fleet.verb("delete", f'{{"document":{{{said}}}}}'.encode())
    assert fleet.verb("list").status == 200
    assert fleet.page("GET", "/console/api/services").status == 200
    assert not [path for path in fleet.root.rglob(".*.new") if path.is_file()]
    # A service is deleted once its pods have ended; other tests compare the files.
    assert eventually(lambda: not list(fleet.root.rglob("deep-*")))


def test_more_than_is_allowed_is_refused_before_it_is_read(fleet: Fleet) -> None:
    for length in (Limits().body_bytes + 1, 2**40, 2**63):
        for verb in VERBS:
            assert_refused(fleet.verb(verb, b"", length=length), verb, length)
        for path in ("scale", "rollout"):
            field = b"authorization: Bearer " + fleet.key.encode()
            where = f"/console/api/services/default/kept/{path}"
            assert_refused(ask(fleet.port, "POST", where, b"", (field,), length=length), path, length)


def test_pages_of_others_change_nothing_whatever_they_call_themselves(fleet: Fleet) -> None:
    """A forged request and DNS rebinding: neither has the key, which no browser sends by itself."""
    for host in ("evil.example", "127.0.0.1", "localhost"):
        for route, right in rights.by_route(rights.FLEET_CONSOLE).items():
            method, path = route.split(" ")
            path = path.replace("{}", "default", 1).replace("{}", "kept")
            fields = (f"origin: http://{host}:{fleet.port}".encode(), b"cookie: key=" + fleet.key.encode())
            answer = ask(fleet.port, method, path, b"", fields)
            assert (answer.status == 401) is (right == "key"), (route, answer)
            assert not [name for name in answer.fields if name.startswith(("access-control-", "set-cookie"))], route


def test_the_key_is_shown_only_to_its_owner(fleet: Fleet) -> None:
    with_it = [path for path in fleet.root.rglob("*") if path.is_file() and fleet.key.encode() in path.read_bytes()]
    assert [path.name for path in with_it] == ["console.json"]
    assert stat.S_IMODE(with_it[0].stat().st_mode) == 0o600
    assert fleet.key not in fleet.running.command_lines()
    for route in rights.by_route(rights.FLEET_CONSOLE):
        method, path = route.split(" ")
        if method == "GET":
            reported = fleet.page("GET", path.replace("{}", "default", 1).replace("{}", "kept"))
            assert fleet.key.encode() not in repr(reported).encode(), route
    for verb in VERBS:
        assert fleet.key.encode() not in fleet.verb(verb, json.dumps(asked("kept")).encode()).body, verb


def test_nothing_so_far_was_an_accident(fleet: Fleet) -> None:
    """Each of the above had an error of its own: the log has none of ours. Last, since it looks back."""
    assert INTERNAL_TEXT not in fleet.running.log and "Traceback" not in fleet.running.log
