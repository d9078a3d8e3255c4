# SPDX-License-Identifier: Apache-2.0
"""The CRDs on a real API server: it takes what our tables take and refuses what they refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schema_values import path, put, sample, ways, whole_document, wrong

from headrace.fleet import schema
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS
from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

CRDS = Path(__file__).parents[2] / "deploy" / "crds"
kinds = pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("crds") / "server") as server:
        # Client-side: the whole of each has to fit into its own annotation.
        server.kubectl("apply", "-f", str(CRDS))
        eventually(lambda: all(condition(each, "Established") == "True" for each in our_crds(server)), within=120)
        eventually(lambda: "inferenceservices" in server.kubectl("api-resources", "--api-group=ome.io"), within=120)
        yield server


def our_crds(server: Any) -> list[dict[str, Any]]:
    """The CRDs of our group on the server, all of them."""
    listed = json.loads(server.kubectl("get", "crd", "-o", "json"))["items"]
    ours = [each for each in listed if each["spec"]["group"] == "ome.io"]
    assert len(ours) == len(KINDS)
    return ours


def condition(crd: dict[str, Any], name: str) -> str | None:
    """The status of a condition. A new CRD has `conditions: null`, at which kubectl's `wait` and `jsonpath` fail."""
    return next((each["status"] for each in crd["status"]["conditions"] or () if each["type"] == name), None)


def resource(kind: Kind) -> Any:
    from lightkube.generic_resource import create_global_resource, create_namespaced_resource

    make = create_namespaced_resource if kind.namespaced else create_global_resource
    return make("ome.io", "v1beta1", kind.name, kind.plural)


def tried(server: Any, kind: Kind, document: dict[str, Any]) -> dict[str, Any] | str:
    """What the server makes of a document, or why it takes none; nothing is kept."""
    from lightkube import ApiError

    limit = time.monotonic() + 120
    while True:
        try:
            made = server.client.create(
                resource(kind)(**document), dry_run=True, **({"namespace": "default"} if kind.namespaced else {})
            )
            return json.loads(json.dumps(made.to_dict()))
        except ApiError as error:
            # The first create after a CRD is established may come too early.
            if error.status.code != 404 or time.monotonic() > limit:
                return error.status.message or "refused"
            time.sleep(0.1)


def test_all_are_established_and_structural(server: Any) -> None:
    for each in our_crds(server):
        assert condition(each, "Established") == "True"
        assert condition(each, "NonStructuralSchema") in (None, "False"), each["metadata"]["name"]
    assert server.kubectl("apply", "-f", str(CRDS)).count("unchanged") == len(KINDS)


@kinds
def test_the_server_accepts_every_field_and_keeps_unknown_ones(server: Any, kind: Kind) -> None:
    document = whole_document(kind, {**sample(kind.spec, full=True), "rollout": {"steps": [1]}})
    made = tried(server, kind, document)
    assert isinstance(made, dict), made
    assert made["spec"] == document["spec"]


@kinds
def test_the_server_defaults_as_we_do(server: Any, kind: Kind) -> None:
    document = whole_document(kind, sample(kind.spec))
    for name in ("model", "runtime", "modelFormat", "modelFramework"):
        row = next((each for each in kind.spec.fields if each.name == name), None)
        if row is not None:
            document["spec"][name] = sample(row)
    made = tried(server, kind, document)
    assert isinstance(made, dict), made
    assert made.get("spec", {}) == schema.with_defaults(document)["spec"]


@kinds
def test_the_server_refuses_what_we_refuse(server: Any, kind: Kind) -> None:
    seen: set[int] = set()
    for steps, field, ours in ways(kind.spec):
        # The rows of a pod stand in many places; one of them will do.
        if ours or id(field) in seen:
            continue
        seen.add(id(field))
        for value in wrong(field):
            document = whole_document(kind, put(kind.spec, steps, value))
            assert schema.validate(document)
            assert isinstance(tried(server, kind, document), str), f"{path(steps)}: {value!r}"


def test_the_servers_table_has_our_columns(server: Any) -> None:
    from lightkube.types import PatchType

    (kind, *_) = KINDS
    server.client.create(
        resource(kind)(**whole_document(kind, {"model": {"name": "m"}, "engine": {}}, "shown")), namespace="default"
    )
    listed = server.kubectl("get", "isvc", "shown")
    assert "URL" in listed and "READY" in listed and "MODEL" in listed and " m " not in listed
    status = {"model": {"name": "chosen-model"}, "runtime": {"name": "chosen-runtime"}}
    server.client.patch(
        resource(kind).Status, "shown", {"status": status}, namespace="default", patch_type=PatchType.MERGE
    )
    row = server.kubectl("get", "isvc", "shown").splitlines()[1]
    assert "chosen-model" in row and "chosen-runtime" in row, row
    long = whole_document(kind, {}, "a" * 64)
    assert isinstance(tried(server, kind, long), str)
