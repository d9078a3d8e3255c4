# SPDX-License-Identifier: Apache-2.0
"""The model agent against a real API server: what it brings, tells and deletes, seen through kubectl."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

CONFIG = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192}
).encode()
HEADER = json.dumps({"w": {"dtype": "BF16", "shape": [1000, 7000], "data_offsets": [0, 0]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS + b"w" * 100_000, "tokenizer.json": b"[]"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from controller_site import Site, install

    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path_factory.mktemp("agent") / "server") as server:
        install(server, [])
        server.kubectl("create", "namespace", "headrace-system")
        site = Site(server)
        site.runtimes()
        yield site
        site.close()


@pytest.fixture
def clean(site: Any) -> Iterator[Any]:
    yield site
    site.server.kubectl("delete", "clusterbasemodels,basemodels", "--all", "-A", check=False)


@pytest.fixture
def hub() -> Iterator[Any]:
    from hub_stub import HubStub

    with HubStub(dict(FILES)) as stub:
        yield stub


@pytest.fixture
def node(clean: Any, tmp_path: Path, hub: Any) -> Iterator[Any]:
    from agent_site import Node

    node = Node(clean, tmp_path, "worker-1", {"HF_ENDPOINT": hub.url("")})
    yield node
    node.close()


def test_models_are_added_reported_and_removed(node: Any, clean: Any, tmp_path: Path, hub: Any) -> None:
    from agent_site import NAMESPACE, Summing, cluster_model, until
    from store_stub import ACCESS, SECRET, StoreStub

    local = tmp_path / "local"
    local.mkdir()
    (local / "config.json").write_bytes(CONFIG)
    with StoreStub({"box": {f"models/s/{name}": body for name, body in FILES.items()}}) as store:
        keys = {"access_key": ACCESS, "secret_key": SECRET, "region": "us-west-1"}
        data = {name: base64.b64encode(value.encode()).decode() for name, value in keys.items()}
        where = {"key": "store", "parameters": {"endpoint": store.url("")}}
        clean.apply(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "store", "namespace": "default"}, "data": data},
            cluster_model("here", f"local://{local}", ""),
            cluster_model("hub", "hf://org/name", node.root / "hub"),
            {
                **cluster_model("stored", "s3://box/models/s", node.root / "stored", **where),
                "kind": "BaseModel",
                "metadata": {"name": "stored", "namespace": "default"},
            },
            cluster_model("claimed", "pvc://claim/x", "/mnt/x"),
            cluster_model("elsewhere", "hf://org/name", node.root / "else", nodeSelector={"zone": "b"}),
            cluster_model("wrong", "hf://org/missing", node.root / "wrong"),
        )
        with Summing(clean.server.kubeconfig) as summing:
            node.start()
            stored = "models.ome.io/default.basemodel.stored"
            until(lambda: node.is_ready("here", "hub") and node.labels().get(stored) == "Ready")
            until(lambda: node.labels().get("models.ome.io/clusterbasemodel.wrong") == "Failed")
            reported = node.entries()
            assert set(node.labels()) == {
                stored,
                *(f"models.ome.io/clusterbasemodel.{name}" for name in ("here", "hub", "wrong")),
            }
            assert (node.root / "hub" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
            assert (node.root / "stored" / "tokenizer.json").read_bytes() == b"[]"
            assert "was not found" in reported["clusterbasemodel.wrong"]["reason"]
            assert reported["clusterbasemodel.hub"]["config"]["artifact"]["sha"] == "a" * 40
            assert reported["clusterbasemodel.here"]["config"]["modelArchitecture"] == "LlamaForCausalLM"
            metadata = clean.fetch(f"/api/v1/namespaces/{NAMESPACE}/configmaps/worker-1")["metadata"]
            assert metadata["labels"] == {"models.ome/basemodel-status": "true"}
            assert metadata["ownerReferences"][0]["kind"] == "Node"

            # The operator's side: status, and what the spec lacked.
            def model(name: str) -> Any:
                return clean.fetch(f"/apis/ome.io/v1beta1/clusterbasemodels/{name}")

            until(lambda: model("hub").get("status", {}).get("nodesReady") == ["worker-1"])
            until(lambda: model("hub")["spec"].get("modelParameterSize") == "7M")
            spec = model("hub")["spec"]
            assert (spec["modelArchitecture"], spec["maxTokens"]) == ("LlamaForCausalLM", 8192)
            assert spec["modelFormat"]["name"] == "safetensors"
            until(lambda: model("wrong").get("status", {}).get("nodesFailed") == ["worker-1"])
            assert model("wrong")["status"]["state"] == "Failed"
            until(lambda: model("elsewhere").get("status", {}).get("state") == "In_Transit")
            until(lambda: model("claimed").get("status", {}).get("state") == "Ready")
            until(lambda: model("here")["spec"].get("modelArchitecture") == "LlamaForCausalLM")
            stored_model = "/apis/ome.io/v1beta1/namespaces/default/basemodels/stored"
            until(lambda: clean.fetch(stored_model)["spec"].get("modelParameterSize") == "7M")

            # Nothing is left to do, so nothing is written: not even of the one that fails again and again.
            until(lambda: summing.statuses.settled)
            before = None
            while before != (before := (node.writes(), summing.api.writes)):
                time.sleep(2)  # past the last write's round
            time.sleep(4)
            assert (node.writes(), summing.api.writes) == before

            clean.server.kubectl("delete", "clusterbasemodel", "here", "hub", "wrong")
            clean.server.kubectl("delete", "basemodel", "stored")
            until(lambda: not node.labels() and not node.entries())
            assert not (node.root / "hub").exists() and not (node.root / "stored").exists()
            assert not list((node.root / ".headrace" / "cache").iterdir())
            assert (local / "config.json").exists(), "what we did not bring is not ours to delete"
    assert node.kill(signal.SIGTERM) == 0


def test_kill_in_the_middle_and_again(node: Any, clean: Any) -> None:
    from agent_site import cluster_model, until
    from web_stub import WebStub

    body = os.urandom(3_000_000)
    served: list[int] = []
    over = threading.Event()

    def slowly(handler: Any) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        served.append(start)
        handler.send_response(206 if start else 200)
        handler.send_header("ETag", '"one"')
        handler.send_header("Content-Length", str(len(body) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        handler.end_headers()
        if len(served) > 2:
            handler.wfile.write(body[start:])
            return
        # A million for each of the first two, who are killed then; not at once, since progress is told now and then.
        for at in range(start, start + 1_000_000, 100_000):
            handler.wfile.write(body[at : at + 100_000])
            handler.wfile.flush()
            time.sleep(0.05)
        over.wait(250)  # whoever asked is killed meanwhile, however long that takes

    with WebStub({"/model.safetensors": slowly}) as web:
        clean.apply(cluster_model("web", web.url("/model.safetensors"), node.root / "web"))
        done = 0
        for _ in range(2):
            node.start()

            def downloaded_more(before: int = done) -> int:
                progress = node.entry("clusterbasemodel.web").get("progress", {})
                return progress.get("completedBytes", 0) if progress.get("completedBytes", 0) > before + 500_000 else 0

            done = until(downloaded_more)
            assert node.labels() == {"models.ome.io/clusterbasemodel.web": "Updating"}
            node.kill()
            assert not (node.root / "web").exists()
        over.set()
        node.start()
        until(lambda: node.is_ready("web"))
    assert (node.root / "web" / "model.safetensors").read_bytes() == body
    assert len(served) == 3 and 500_000 <= served[1] < served[2]

    # Deleted while nobody looks: who comes back puts it right. And what is whole needs no source any more.
    node.kill()
    clean.apply(cluster_model("web", web.url("/model.safetensors"), node.root / "web"))
    node.start()
    until(lambda: node.is_ready("web"))
    node.kill()
    clean.server.kubectl("delete", "clusterbasemodel", "web")
    node.start()
    until(lambda: not node.labels() and not node.entries())
    assert not (node.root / "web").exists()


def test_the_same_artefact_is_downloaded_once(node: Any, clean: Any, hub: Any) -> None:
    from agent_site import cluster_model, until

    node.start()
    clean.apply(cluster_model("one", "hf://org/name", node.root / "one"))
    until(lambda: node.is_ready("one"))
    first = sum("/resolve/" in path for path, _ in hub.seen)
    clean.apply(cluster_model("two", "hf://org/name@v1", node.root / "two"))
    until(lambda: node.is_ready("two"))
    assert sum("/resolve/" in path for path, _ in hub.seen) == first > 0
    assert (node.root / "one" / "model.safetensors").samefile(node.root / "two" / "model.safetensors")
    clean.server.kubectl("delete", "clusterbasemodel", "one")
    until(lambda: not (node.root / "one").exists())
    assert (node.root / "two" / "config.json").read_bytes() == CONFIG


def test_a_disk_that_is_too_small_is_reported_with_sizes(node: Any, clean: Any, hub: Any) -> None:
    from agent_site import cluster_model, until

    clean.apply(cluster_model("large", "hf://org/name", node.root / "large"))
    node.start("--keep-free", "1000TB")
    until(lambda: node.labels().get("models.ome.io/clusterbasemodel.large") == "Failed")
    entry = node.entry("clusterbasemodel.large")
    assert entry["status"] == "Failed" and "it needs 100." in entry["reason"] and "1000.0 TB" in entry["reason"]
    assert not any("/resolve/" in path for path, _ in hub.seen) and not (node.root / "large").exists()
    node.kill()
    node.start()
    until(lambda: node.is_ready("large"))
    assert "reason" not in node.entry("clusterbasemodel.large")


def test_what_others_change_is_put_right(node: Any, clean: Any) -> None:
    from agent_site import NAMESPACE, cluster_model, until

    kubectl = clean.server.kubectl
    clean.apply(
        cluster_model("kept", "hf://org/name", node.root / "kept"),
        cluster_model("zoned", "hf://org/name", node.root / "zoned", nodeSelector={"zone": "a"}),
    )
    node.start()
    until(lambda: node.is_ready("kept"))
    label = "models.ome.io/clusterbasemodel.kept"
    until(lambda: set(node.labels()) == {label})
    kubectl("label", "node", "worker-1", f"{label}-", "models.ome.io/clusterbasemodel.forged=Ready")
    until(lambda: node.labels() == {label: "Ready"})
    kubectl("delete", "configmap", "worker-1", "-n", NAMESPACE)
    until(lambda: node.is_ready("kept"))
    (node.root / "kept" / "model.safetensors").unlink()
    until(lambda: (node.root / "kept" / "model.safetensors").exists())
    # The node is of the zone from now on, and then it is not.
    kubectl("label", "node", "worker-1", "zone=a")
    until(lambda: node.is_ready("zoned"))
    kubectl("label", "node", "worker-1", "zone-")
    until(lambda: set(node.labels()) == {label} and not (node.root / "zoned").exists())
    # Reserved files stay.
    kubectl("label", "clusterbasemodel", "kept", "models.ome/reserve-model-artifact=true")
    until(lambda: '"reserved":true' in _records(node.root))
    kubectl("delete", "clusterbasemodel", "kept")
    until(lambda: not node.labels() and not node.entries())
    assert (node.root / "kept" / "config.json").read_bytes() == CONFIG


def _records(root: Path) -> str:
    """What the agent has written down of its models; "" of one that has just gone."""
    output = ""
    for path in (root / ".headrace" / "models").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            output += path.read_text()
    return output


def test_a_missing_secret_is_reported_and_found_later(node: Any, clean: Any, hub: Any) -> None:
    from agent_site import NAMESPACE, cluster_model, until

    hub.token = "hf_right"
    clean.apply(cluster_model("gated", "hf://org/name", node.root / "gated", key="hub-token"))
    node.start()
    until(lambda: "is not there; create it" in node.entry("clusterbasemodel.gated").get("reason", ""))
    clean.server.kubectl("create", "secret", "generic", "hub-token", "-n", NAMESPACE, "--from-literal=token=hf_right")
    until(lambda: node.is_ready("gated"))
    assert "hf_right" not in node.log.read_text() + json.dumps(node.entries())


def test_a_real_store_through_its_own_protocol(node: Any, clean: Any, tmp_path: Path) -> None:
    from agent_site import NAMESPACE, cluster_model, until
    from s3_server import ACCESS_KEY, SECRET_KEY, s3_server

    with s3_server(tmp_path) as store:
        store.make("box", {f"models/s/{name}": body for name, body in FILES.items()})
        clean.server.kubectl(
            *("create", "secret", "generic", "keys", "-n", NAMESPACE),
            *(f"--from-literal=AWS_ACCESS_KEY_ID={ACCESS_KEY}", f"--from-literal=AWS_SECRET_ACCESS_KEY={SECRET_KEY}"),
        )
        where = {"key": "keys", "parameters": {"endpoint": store.endpoint}}
        clean.apply(
            cluster_model("s3", "s3://box@us-east-1/models/s", node.root / "s3", **where),
            cluster_model("nothing", "s3://box/none", node.root / "nothing", **where),
        )
        node.start()
        until(lambda: node.is_ready("s3"))
        until(lambda: "there is nothing at s3://box/none" in node.entry("clusterbasemodel.nothing").get("reason", ""))
    assert {path.name: path.read_bytes() for path in (node.root / "s3").iterdir()} == FILES
    assert SECRET_KEY not in node.log.read_text() + json.dumps(node.entries())


def test_a_service_shows_what_the_agent_reports(node: Any, clean: Any) -> None:
    from agent_site import cluster_model, until
    from controller_site import Running

    model = cluster_model("served", "hf://org/missing", node.root / "served")
    model["spec"] |= {"modelFormat": {"name": "safetensors"}, "modelArchitecture": "LlamaForCausalLM"}
    runner = {"name": "ome-container", "image": "registry.example/engine:1"}
    service = {
        "apiVersion": "ome.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"model": {"name": "served"}, "engine": {"runner": runner}},
    }

    def failure() -> Any:
        return (clean.service("chat").get("status", {}).get("modelStatus") or {}).get("lastFailureInfo", {})

    with Running(clean.server.kubeconfig):
        clean.apply(model, service)
        node.start()
        reported = until(lambda: result if "failed on worker-1" in (result := failure()).get("message", "") else {})
        assert reported["reason"] == "BaseModelNotReady"
        clean.apply(
            {**model, "spec": {**model["spec"], "storage": {**model["spec"]["storage"], "storageUri": "hf://org/name"}}}
        )
        until(lambda: node.is_ready("served") and not failure())
        clean.server.kubectl("delete", "isvc", "chat")


def test_the_rights_that_it_is_installed_with_are_enough(node: Any, clean: Any) -> None:
    from agent_site import NAMESPACE, cluster_model, until

    from headrace.fleet.install.manifests import agent_objects
    from headrace.fleet.install.settings import ManifestSettings

    kubectl = clean.server.kubectl
    for name in ("hub-one", "hub-two"):
        kubectl("create", "secret", "generic", name, "-n", NAMESPACE, "--from-literal=token=x")
    rights = [
        agent_manifest
        for agent_manifest in agent_objects(ManifestSettings(agent_secrets=("hub-one",)))
        if "Role" in agent_manifest["kind"]
    ]
    subject = {"kind": "User", "name": "nobody", "apiGroup": "rbac.authorization.k8s.io"}
    clean.apply(*({**right, "subjects": [subject]} if "subjects" in right else right for right in rights))
    node.environment["KUBECONFIG"] = str(clean.server.kubeconfig_of_nobody())
    clean.apply(
        cluster_model("named", "hf://org/name", node.root / "named", key="hub-one"),
        cluster_model("other", "hf://org/name", node.root / "other", key="hub-two"),
    )
    node.start()
    until(lambda: node.is_ready("named"))
    until(lambda: "--agent-secret hub-two" in node.entry("clusterbasemodel.other").get("reason", ""))
    assert "headrace-model-agent-secrets" in node.entry("clusterbasemodel.other")["reason"]
    kubectl(
        *("create", "rolebinding", "agent-secrets", "-n", NAMESPACE),
        *("--clusterrole", "headrace-model-agent-secrets", "--user", "nobody"),
    )
    until(lambda: node.is_ready("other"))
    kubectl("delete", "clusterbasemodel", "--all")
    until(lambda: not node.labels() and not node.entries())


def test_a_model_that_ome_has_left_can_be_deleted(clean: Any) -> None:
    from agent_site import Summing, cluster_model, until

    model = cluster_model("left", "hf://org/name", "/mnt/models/left")
    model["metadata"]["finalizers"] = ["clusterbasemodels.ome.io/finalizer", "example.com/other"]
    clean.apply(model)
    path = "/apis/ome.io/v1beta1/clusterbasemodels/left"
    with Summing(clean.server.kubeconfig):
        clean.server.kubectl("delete", "clusterbasemodel", "left", "--wait=false")
        until(lambda: clean.fetch(path)["metadata"]["finalizers"] == ["example.com/other"])
        clean.server.kubectl(
            "patch", "clusterbasemodel", "left", "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
        )
        until(lambda: clean.fetch(path) is None)
