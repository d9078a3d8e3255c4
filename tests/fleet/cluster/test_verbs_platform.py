# SPDX-License-Identifier: Apache-2.0
"""The verbs as a user types them, on a real API server with the controller running."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SAMPLES = Path(__file__).parents[3] / "headrace" / "fleet" / "samples"
ALL = sorted(each.stem for each in SAMPLES.glob("*.yaml"))
FOREIGN = ("Service.serving.knative.dev", "LeaderWorkerSet.", "RayCluster.")
"""What nobody here acts on: a service with one of these does not become ready."""


@contextlib.contextmanager
def pods_marked(site: Any, *, but: str = "") -> Iterator[None]:
    """In place of a kubelet: every pod that comes is ready soon, but those whose name has that word."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.1):
            for each in site.fetch("/api/v1/pods")["items"]:
                told = {one["type"] for one in each["status"].get("conditions", ()) if one["status"] == "True"}
                if "Ready" not in told and not (but and but in each["metadata"]["name"]):
                    site.mark_pod(each)

    thread = threading.Thread(target=work, name="marking pods")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def all_ready(site: Any) -> bool:
    """Whether every pod that there is has been marked."""
    from controller_site import is_ready

    return all(is_ready(each) for each in site.fetch("/api/v1/pods")["items"])


class Verbs:
    """`headrace`, with the kubeconfig of the site."""

    def __init__(self, site: Any) -> None:
        self.kubeconfig = site.server.kubeconfig

    def __call__(self, *words: str | Path, code: int = 0, input: str | None = None, kubeconfig: Any = None) -> str:
        from typer.testing import CliRunner

        from headrace.cli.main import app

        where = ["--kube", "--kubeconfig", str(kubeconfig or self.kubeconfig)]
        result = CliRunner().invoke(app, [*(str(each) for each in words), *where], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (words, result.output)
        return result.output

    def rows(self, *words: str) -> dict[str, dict[str, str]]:
        """A table by its first column: cells by heading."""
        head, *lines = self(*words).splitlines()
        starts = [(name, head.index(name)) for name in head.split()]
        ends = [start for _, start in starts[1:]] + [None]
        found = [
            {name: each[start:end].strip() for (name, start), end in zip(starts, ends, strict=True)} for each in lines
        ]
        return {each["NAME"]: each for each in found}


@pytest.fixture
def verbs(clean: Any) -> Verbs:
    return Verbs(clean)


@pytest.mark.parametrize("sample", ALL)
def test_a_sample_is_applied_waited_for_shown_and_deleted(clean: Any, verbs: Verbs, sample: str) -> None:
    from controller_site import Running, until

    file = SAMPLES / f"{sample}.yaml"
    documents = clean.sample(sample)
    services = [each["metadata"]["name"] for each in documents if each["kind"] == "InferenceService"]
    with Running(clean.server.kubeconfig) as running, pods_marked(clean):
        said = verbs("apply", "-f", file)
        assert said.count(" created\n") == len(documents), said
        running.settle()
        waits = any(each.startswith(FOREIGN) for each in clean.children())
        said = verbs("apply", "-f", file, "--wait", "--timeout", "1" if waits else "120", code=1 if waits else 0)
        assert " created" not in said and " configured" not in said, said
        for name in services:
            row = verbs.rows("get", "isvc")[name]
            if waits:
                assert f"{name} is not ready: not ready within 1 s: " in said
                assert row["READY"] in ("False", "Unknown") and len(row["REASON"]) > 5, row
            else:
                assert f"{name} is ready: http" in said and row["URL"].startswith("http://")
                assert row["READY"] == "True" and row["REASON"] == "-", row
        running.settle()
        until(lambda: all_ready(clean))
        running.settle()
        count = len(running.writes)
        for each in documents:
            told = verbs("describe", f"{each['kind']}/{each['metadata']['name']}")
            assert f"{each['kind']} " in told and each["metadata"]["name"] in told
            assert ("\nNext\n" in told) == (each["kind"] == "InferenceService")
        assert len(running.writes) == count, "who looks changes nothing"
        verbs("delete", "-f", file, "--timeout", "120")
        assert all(clean.service(name) is None for name in services)
        assert not [each for name in services for each in clean.pods(name)]
        assert verbs("get", "models", "-o", "name") == ""


def test_the_reason_of_an_unready_service_is_shown(clean: Any, verbs: Verbs) -> None:
    from controller_site import Running, until

    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    broken = {"name": "ome-container", "image": "x", "imageID": "", "ready": False, "restartCount": 3, "state": waiting}
    with Running(clean.server.kubeconfig) as running:
        verbs("apply", "-f", SAMPLES / "cpu.yaml")
        (pod,) = until(lambda: clean.pods("digits"))
        name = pod["metadata"]["name"]
        full = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes: no memory.",
        }
        clean.server.mark(name, {"phase": "Pending", "conditions": [full]})
        until(lambda: "no memory" in verbs.rows("get", "isvc", "digits")["digits"]["REASON"])
        assert "no node takes pod" in verbs("describe", "isvc", "digits")
        clean.server.mark(
            name, {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}],
                   "containerStatuses": [broken]},
        )  # fmt: skip
        row = until(lambda: "no such image" in (row := verbs.rows("get", "isvc")["digits"])["REASON"] and row)
        assert row["READY"] == "False" and row["REASON"].startswith("ImagePullBackOff: "), row
        told = verbs("describe", "isvc/digits")
        assert "check the image's name" in told and "FailedToLoad" in told
        (shown,) = json.loads(verbs("describe", "isvc", "digits", "--json"))["pods"]
        assert shown["restarts"] == 3 and shown["reason"] == "ImagePullBackOff"
        until(lambda: "ImagePullBackOff" in verbs("describe", "isvc", "digits").partition("Events")[2])
        running.settle()
        said = verbs("apply", "-f", SAMPLES / "cpu.yaml", "--wait", "--timeout", "2", code=1)
        assert "no such image" in said.splitlines()[-1] and "unchanged" in said
        # The model that it needs is taken away: the service must be edited, and nobody waits long for that.
        verbs("delete", "model", "digits")
        said = verbs("apply", "-f", "-", "--wait", "--json", code=2, input=yaml.safe_dump(clean.sample("cpu")[-1]))
        (error,) = json.loads(said)["errors"]
        assert error["field"] == "spec.model.name" and error["place"].startswith("<stdin>:")
        until(lambda: "BaseModelNotFound" in verbs.rows("get", "isvc")["digits"]["REASON"])
        assert "apply the file again" in verbs("describe", "isvc", "digits")


def test_a_canary_is_promoted_and_undone(clean: Any, verbs: Verbs, tmp_path: Path) -> None:
    from controller_site import Running, until

    (model, service) = clean.sample("cpu")
    file = tmp_path / "digits.yaml"

    def write(value: str, percent: int | None) -> None:
        engine = {"minReplicas": 1, "maxReplicas": 3} | ({} if percent is None else {"canaryTrafficPercent": percent})
        engine["runner"] = {"name": "ome-container", "env": [{"name": "TRY", "value": value}]}
        service["spec"]["engine"] = engine
        file.write_text(yaml.safe_dump_all([model, service]))

    def traffic() -> str:
        return verbs.rows("get", "isvc")["digits"]["TRAFFIC"]

    def deployed() -> list[str]:
        found = clean.fetch("/apis/apps/v1/namespaces/default/deployments?labelSelector=component=engine")["items"]
        return sorted(each["metadata"]["name"] for each in found)

    def tried() -> str:
        found = clean.fetch("/apis/apps/v1/namespaces/default/deployments/digits-engine")
        (runner,) = (
            each for each in found["spec"]["template"]["spec"]["containers"] if each["name"] == "ome-container"
        )
        return next(each["value"] for each in runner["env"] if each["name"] == "TRY")

    with Running(clean.server.kubeconfig) as running, pods_marked(clean):
        write("one", None)
        verbs("apply", "-f", file, "--wait", "--timeout", "120")
        verbs("rollout", "promote", "digits", code=1)
        write("two", 20)
        assert "configured" in verbs("apply", "-f", file, "--wait", "--timeout", "120")
        until(lambda: traffic() == "20% new, 80% old")
        told = json.loads(verbs("rollout", "status", "digits", "--json"))["components"]
        assert [each["percent"] for each in told[0]["traffic"]] == [20, 80] and "canary at 20%" in told[0]["state"]
        assert verbs("rollout", "undo", "digits") == "inferenceservice.ome.io/digits undone\n"
        until(lambda: "undone" in verbs("rollout", "status", "digits") and "0% new" in traffic())
        verbs("rollout", "undo", "digits", code=1)
        assert deployed() == ["digits-engine", "digits-engine-canary"]
        # The file says 20 still: what our own verb changed is no conflict.
        assert "digits configured" in verbs("apply", "-f", file)
        until(lambda: traffic() == "20% new, 80% old")
        assert "promoted" in verbs("rollout", "promote", "digits", "--wait", "--timeout", "120")
        until(lambda: traffic() == "100%" and deployed() == ["digits-engine"])
        running.settle()
        assert "rolled out" in verbs("rollout", "status", "digits")
        assert tried() == "two"
        # The pods before the promotion are gone: their spec is in the history.
        assert [each["revision"] for each in json.loads(verbs("rollout", "history", "digits", "--json"))] == [1, 2]
        assert verbs("rollout", "undo", "digits") == "inferenceservice.ome.io/digits undone\n"
        until(lambda: tried() == "one" and deployed() == ["digits-engine"])
        verbs("delete", "isvc", "digits")
        until(lambda: not clean.children())


def test_documents_are_kubectls_and_can_be_applied_again(clean: Any, verbs: Verbs, tmp_path: Path) -> None:
    from controller_site import Running, until

    with Running(clean.server.kubeconfig) as running, pods_marked(clean):
        verbs("apply", "-f", SAMPLES / "cpu.yaml", "-f", SAMPLES / "raw.yaml", "--wait", "--timeout", "120")
        running.settle()
        until(lambda: all_ready(clean))
        running.settle()
        for words in (
            ["isvc"],
            ["isvc", "digits"],
            ["clusterbasemodels.ome.io"],
            ["clusterservingruntimes.ome.io", "triton"],
        ):
            ours = verbs("get", *words, "-o", "yaml")
            theirs = clean.server.kubectl("get", *words, "-o", "yaml")
            assert _plain(yaml.safe_load(ours)) == _plain(yaml.safe_load(theirs)), words
            assert list(yaml.safe_load(ours)) == list(yaml.safe_load(theirs))
            assert json.loads(verbs("get", *words, "--json")) == yaml.safe_load(ours)
        assert verbs("get", "-o", "name") == clean.server.kubectl("get", "isvc", "-o", "name")
        file = tmp_path / "saved.yaml"
        file.write_text(verbs("get", "isvc", "digits", "-o", "yaml"))
        assert "inferenceservice.ome.io/digits unchanged" in verbs("apply", "-f", file)
        clean.server.kubectl("label", "isvc", "digits", "team=blue")
        assert list(verbs.rows("get", "isvc", "-l", "team=blue")) == ["digits"]
        assert list(verbs.rows("get", "isvc", "-l", "team!=blue")) == ["llama-chat"]


def _plain(value: Any) -> Any:
    """Without what kubectl of another version adds to every object."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in ("managedFields", "selfLink")}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def test_nothing_is_applied_while_anything_is_wrong(clean: Any, verbs: Verbs, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text((SAMPLES / "cpu.yaml").read_text())
    bad = clean.sample("raw")[-1]
    bad["spec"]["engine"] |= {"minReplicas": 9, "maxReplicas": 2}
    (tmp_path / "b.yaml").write_text(f"# one\n# two\n{yaml.safe_dump(bad)}")
    said = verbs("apply", "-f", tmp_path, code=2)
    assert f"{tmp_path}/b.yaml:" in said and "minReplicas" in said and "there is no model" in said
    assert clean.service("digits") is None and clean.service("llama-chat") is None
    line = next(each for each in said.splitlines() if "minReplicas" in each)
    number = int(line.split(":")[2])
    assert "minReplicas" in (tmp_path / "b.yaml").read_text().splitlines()[number - 1], line
    # The same with nothing wrong, only asked.
    assert "digits created (dry run)" in verbs("apply", "-f", tmp_path / "a.yaml", "--dry-run")
    assert clean.service("digits") is None
    verbs("delete", "-f", tmp_path / "a.yaml", code=1)
    verbs("delete", "-f", tmp_path / "a.yaml", "--ignore-not-found")


def test_foreign_objects_are_applied_too_and_conflicts_are_reported(clean: Any, verbs: Verbs, tmp_path: Path) -> None:
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "verbs"}}
    claim = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mine", "namespace": "verbs"},
        "data": {"a": "b"},
    }
    (model, service) = clean.sample("cpu")
    for each in (model, service):
        del each["metadata"]["namespace"]
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all([service, model, claim]))
    said = verbs("apply", "-f", file, "-n", "verbs", code=1)
    assert 'namespaces "verbs" not found' in said and "create it first" in said
    file.write_text(yaml.safe_dump_all([service, model, space, claim]))
    said = verbs("apply", "-f", file, "-n", "verbs")
    assert [each.partition(" ")[0] for each in said.splitlines()] == [
        "namespace/verbs",
        "configmap/mine",
        "basemodel.ome.io/digits",
        "inferenceservice.ome.io/digits",
    ]
    assert list(verbs.rows("get", "isvc", "-n", "verbs")) == ["digits"]
    assert (
        "verbs" in verbs("get", "isvc", "-A") and verbs("get", "isvc") == "no inferenceservices in namespace default\n"
    )
    clean.server.kubectl(
        "-n", "verbs", "patch", "isvc", "digits", "--type=merge", "-p", '{"spec":{"engine":{"maxReplicas":5}}}'
    )
    said = verbs("apply", "-f", file, "-n", "verbs", code=1)
    assert "--force-conflicts" in said and "maxReplicas" in said
    assert "digits configured" in verbs("apply", "-f", file, "-n", "verbs", "--force-conflicts")
    said = verbs("apply", "-f", SAMPLES / "cpu.yaml", "-n", "verbs", code=2)
    assert "metadata.namespace" in said
    gone = verbs("delete", "-f", file, "-n", "verbs", "--no-wait", "--json")
    assert json.loads(gone)["deleted"][0] == "inferenceservice.ome.io/digits"


def test_changes_are_watched(clean: Any, verbs: Verbs) -> None:
    import asyncio

    from headrace.fleet.client.contract import closing, kind_named
    from headrace.fleet.client.kubernetes import open_cluster

    seen: list[tuple[str, str]] = []

    async def work() -> None:
        fleet = open_cluster(str(clean.server.kubeconfig))
        try:
            async with closing(fleet.watch(kind_named("BaseModel"), "default")) as changes:
                async for change, each in changes:
                    seen.append((change, each["metadata"]["name"]))
                    assert each["kind"] == "BaseModel" and each["apiVersion"] == "ome.io/v1beta1"
                    if len(seen) == 1:
                        clean.server.kubectl("label", "basemodels.ome.io", "digits", "a=b")
                    elif len(seen) == 2:
                        clean.server.kubectl("delete", "basemodels.ome.io", "digits")
                    else:
                        return
        finally:
            await fleet.close()

    verbs("apply", "-f", "-", input=yaml.safe_dump(clean.sample("cpu")[0]))
    asyncio.run(asyncio.wait_for(work(), 120))
    assert seen == [("ADDED", "digits"), ("MODIFIED", "digits"), ("DELETED", "digits")]


def test_a_user_with_rights_to_services_only_sees_those(clean: Any, verbs: Verbs) -> None:
    from controller_site import until

    role = ["create", "role", "looks", "--verb=get,list,patch,create", "--resource=inferenceservices.ome.io"]
    clean.server.kubectl(*role)
    clean.server.kubectl("create", "rolebinding", "looks", "--role=looks", "--user=nobody")
    nobody = clean.server.kubeconfig_of_nobody()
    clean.apply(*clean.sample("cpu"))
    asked = ("auth", "can-i", "list", "inferenceservices.ome.io", "--as=nobody")
    until(lambda: clean.server.kubectl(*asked, check=False).startswith("yes"))  # it takes the API server a moment
    try:
        assert "digits" in verbs("get", kubeconfig=nobody)
        told = verbs("describe", "isvc", "digits", kubeconfig=nobody)
        assert "not shown: you may not do that" in told and "cannot list resource" in told and "\nNext\n" in told
        (_, service) = clean.sample("cpu")
        service["metadata"]["name"] = "theirs"
        said = verbs("apply", "-f", "-", input=yaml.safe_dump(service), kubeconfig=nobody)
        assert "are not checked" in said and "inferenceservice.ome.io/theirs created" in said
        assert 'cannot delete resource "inferenceservices"' in verbs(
            "delete", "isvc", "theirs", code=1, kubeconfig=nobody
        )
    finally:
        clean.server.kubectl("delete", "role,rolebinding", "looks")


def test_without_rights_or_services_there_is_advice(clean: Any, verbs: Verbs, tmp_path: Path) -> None:
    from support.kubernetes_server import KubernetesServer

    nobody = clean.server.kubeconfig_of_nobody()
    said = verbs("get", "isvc", code=1, kubeconfig=nobody)
    assert said.count("\n") == 1 and 'User "nobody" cannot list' in said and "ask for that permission" in said
    said = verbs("get", code=1, kubeconfig=tmp_path / "none")
    assert said.count("\n") == 1 and "there is no kubeconfig at" in said
    said = verbs("get", "--context", "other", code=1)
    assert said.count("\n") == 1 and "context" in said
    gone = tmp_path / "gone"
    server = yaml.safe_load(clean.server.kubeconfig.read_text())
    server["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    gone.write_text(yaml.safe_dump(server))
    said = verbs("get", code=1, kubeconfig=gone)
    assert said.count("\n") == 1 and "https://127.0.0.1:1 does not answer" in said and "kubectl cluster-info" in said
    with KubernetesServer(tmp_path / "bare") as bare:
        for words in (["get"], ["get", "isvc", "x"], ["describe", "model", "x"], ["apply", "-f", SAMPLES / "cpu.yaml"]):
            said = verbs(*words, code=1, kubeconfig=bare.kubeconfig)
            assert said.count("\n") == 2 and "does not have that kind" in said, said
            assert said.endswith("\n  try: headrace operator manifests | kubectl apply -f -\n"), said
