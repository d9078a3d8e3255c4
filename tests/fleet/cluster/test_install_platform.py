# SPDX-License-Identifier: Apache-2.0
"""Headrace installed on a real API server, by kubectl and by helm; its programs as the accounts that they get there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

HEADRACE = Path(sys.executable).parent / "headrace"
SAMPLES = sorted((Path(__file__).parents[3] / "headrace" / "fleet" / "samples").glob("*.yaml"))
SYSTEM = "headrace-system"
LEFT = {"raw": "inferenceservice.finalizers", "benchmark": "benchmarkjob.finalizers"}
"""What OME may have left on objects, and is taken away when they go."""
OPERATOR = f"system:serviceaccount:{SYSTEM}:headrace-operator"
AGENT = f"system:serviceaccount:{SYSTEM}:headrace-model-agent"


def headrace(*words: str) -> str:
    return subprocess.run([HEADRACE, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of its own: what is installed here is no other test's business."""
    from controller_site import FOREIGN, Site, foreign_crd, until

    from support.kubernetes_server import KubernetesServer

    folder = tmp_path_factory.mktemp("installed")
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{"level": "Metadata"}]}
    (folder / "policy").write_text(json.dumps(policy | {"omitStages": ["RequestReceived", "ResponseStarted"]}))
    told = f"--audit-policy-file={folder}/policy --audit-log-path={folder}/server/audit --audit-log-mode=blocking"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBERNETES_APISERVER_FLAGS", told)
        server = KubernetesServer(folder / "server").start()
    try:
        made = headrace("operator", "manifests")
        assert "serverside-applied" in server.kubectl("apply", "--server-side", "-f", "-", input=made)
        foreign = yaml.safe_dump_all([foreign_crd(each) for each in FOREIGN])
        server.kubectl("apply", "-f", "-", input=foreign)
        site = Site(server)
        for each in ("clusterservingruntimes", "inferenceservices", "benchmarkjobs"):
            until(lambda each=each: site.fetch(f"/apis/ome.io/v1beta1/{each}"))
        server.kubectl("apply", "-f", "-", input=headrace("operator", "manifests", "--runtimes"))
        # There is no kubelet who would start it; the tests do, as what it would be.
        server.kubectl("scale", "-n", SYSTEM, "deployment/headrace-operator", "--replicas=0")
        for account in (OPERATOR, AGENT):  # the API server has heard of their rights
            asked = ("auth", "can-i", "list", "clusterbasemodels.ome.io", f"--as={account}")
            until(lambda asked=asked: server.kubectl(*asked, check=False).startswith("yes"))
        yield site
        site.close()
    finally:
        server.stop()


def verbs_of(site: Any, account: str) -> tuple[set[tuple[str, str, str]], list[str]]:
    """What an account has done, as its rights name it, and what it was refused: the API server wrote it down."""
    done, refused = set(), []
    for line in (site.server.folder / "audit").read_text().splitlines():
        event = json.loads(line)
        if event["user"]["username"] != account or "objectRef" not in event:
            continue
        where = event["objectRef"]
        if where.get("apiGroup") in ("authorization.k8s.io", "authentication.k8s.io"):
            continue
        plural = "/".join(filter(None, (where.get("resource", ""), where.get("subresource", ""))))
        if event["annotations"]["authorization.k8s.io/decision"] == "allow":
            # An apply of what is not there yet asks for both.
            verbs = ("patch", "create") if event["verb"] == "patch" else (event["verb"],)
            done.update((where.get("apiGroup", ""), plural, verb) for verb in verbs)
        else:
            refused.append(f"{event['verb']} {event['requestURI']}")
    return done, refused


def rights_of(program: str) -> set[tuple[str, str, str]]:
    """What the manifests give to an account."""
    made = list(yaml.safe_load_all(headrace("operator", "manifests", "--without", "crds")))
    bound = {
        (each["roleRef"]["kind"], each["roleRef"]["name"])
        for each in made
        if each["kind"].endswith("Binding") and each["subjects"][0]["name"] == program
    }
    return {
        (group, resource, verb)
        for each in made
        if (each["kind"], each["metadata"]["name"]) in bound
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_plain_kubectl_takes_it_and_has_nothing_to_do_again(installed: Any) -> None:
    made = headrace("operator", "manifests", "--replicas", "0")
    installed.server.kubectl("apply", "-f", "-", input=made)
    again = installed.server.kubectl("apply", "-f", "-", input=made).splitlines()
    assert again and all(each.endswith(" unchanged") for each in again), again
    for each in yaml.safe_load_all(made):
        if each["kind"] == "CustomResourceDefinition":
            found = installed.server.kubectl("get", "crd", each["metadata"]["name"], "-o", "json")
            conditions = {one["type"]: one["status"] for one in json.loads(found)["status"]["conditions"]}
            assert conditions["Established"] == "True" and conditions.get("NonStructuralSchema") != "True"


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_is_accepted(installed: Any, path: Path) -> None:
    kubectl = installed.server.kubectl
    versions = (
        "get",
        "-f",
        str(path),
        "-o",
        "jsonpath={.items[*].metadata.resourceVersion}{.metadata.resourceVersion}",
    )
    kubectl("apply", "-f", str(path))
    before = kubectl(*versions)
    # kubectl says "configured" of lists with defaults in them; nothing is written for all that.
    kubectl("apply", "-f", str(path))
    assert before and kubectl(*versions) == before
    kubectl("delete", "-f", str(path))


def _of_use_elsewhere(group: str, resource: str, verb: str) -> bool:
    """What the operator does not do with these samples and settings."""
    plural, _, part = resource.partition("/")
    return (
        verb == "delete"  # parts that a service no longer has
        or part in ("finalizers", "scale")  # asked for by some clusters; handed on to our router
        or (resource, verb) == ("pods", "get")  # handed on to routers
        or plural in ("basemodels", "clusterbasemodels")  # what agents tell
        or plural in ("ingresses", "httproutes", "virtualservices")  # with other settings
        or plural == "endpointslices"  # of services at zero, on the shared activator
        or plural == "networkpolicies"  # with --isolate-services
    )


def kubeconfig_of(site: Any, account: str, path: Path) -> Path:
    """A kubeconfig of one of our accounts, as the token in its pod would make it."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    where = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{account}/token"
    answer = site._client.post(where, json=request)
    assert answer.status_code == 201, answer.text
    path.write_text(site.server.kubeconfig.read_text().replace("admintoken", answer.json()["status"]["token"]))
    return path


def test_the_operators_rights_are_enough(installed: Any, tmp_path: Path) -> None:
    from controller_site import until

    from support.ports import free_port

    port, hooks = free_port(), free_port()
    words = ["--listen", f"127.0.0.1:{port}", "--webhook-listen", f"127.0.0.1:{hooks}"]
    words += ["--webhook-url", f"https://127.0.0.1:{hooks}", "--kubeconfig"]
    config = kubeconfig_of(installed, "headrace-operator", tmp_path / "operator")
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [HEADRACE, "operator", "run", *words, str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "POD_NAME": "the-operator"},
        )
    try:
        hooked = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/headrace-operator"
        until(lambda: process.poll() is not None or installed.fetch(hooked))
        names = []
        for path in SAMPLES:
            found = installed.sample(path.stem)
            if path.stem in LEFT:
                found[-1]["metadata"]["finalizers"] = [LEFT[path.stem]]
            installed.apply(*found)
            names += [each["metadata"]["name"] for each in found if each["kind"] == "InferenceService"]
        until(lambda: process.poll() is not None or all(installed.ready(each) for each in names), 90)
        reasons = {each: installed.ready(each).get("reason") for each in names}
        assert "ReconcileError" not in reasons.values(), reasons
        for each in ("llama-chat", "llama-measured"):
            installed.mark_pods(each)
            until(lambda each=each: installed.ready(each).get("status") == "True")
        # An Event that comes again is counted, which is a right of its own.
        for pod in installed.pods("llama-chat"):
            conditions = [{"type": each, "status": "False"} for each in ("ContainersReady", "Ready")]
            installed.server.mark(pod["metadata"]["name"], {"conditions": conditions})
        until(lambda: installed.ready("llama-chat").get("status") == "False")
        installed.mark_pods("llama-chat")
        until(lambda: any(each["count"] == 2 for each in installed.events("llama-chat")))
        # Which the measurement has waited for.
        until(lambda: installed.fetch("/apis/batch/v1/namespaces/default/jobs")["items"])
        assert installed.children() and installed.events("llama-chat") is not None
        installed.server.kubectl("delete", "isvc,benchmarkjobs.ome.io", "--all")
        until(lambda: not installed.children(), 90)
        for path in SAMPLES:
            installed.server.kubectl("delete", "--ignore-not-found", "-f", str(path))
    finally:
        process.terminate()
        code = process.wait(60)
    said = log.read_text()
    assert code == 0, said
    needed = {each for each in rights_of("headrace-operator") if not _of_use_elsewhere(*each)}
    assert _unused(installed, OPERATOR, needed) == []
    assert verbs_of(installed, OPERATOR)[1] == [], said


def _unused(site: Any, account: str, rights: set[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """What an account that has ended never did. A watch is written down when the API server has noticed its end."""
    limit = time.monotonic() + 60
    while (left := rights - verbs_of(site, account)[0]) and time.monotonic() < limit:
        time.sleep(0.2)
    return sorted(left)


def test_the_agents_rights_are_enough(installed: Any, tmp_path: Path) -> None:
    from controller_site import until

    from support.ports import free_port

    installed.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"}})
    models = tmp_path / "models"
    files = models / "there"
    files.mkdir(parents=True)
    (files / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    storage = {"storageUri": f"local://{files}", "path": str(files)}
    installed.apply(
        {
            "apiVersion": "ome.io/v1beta1",
            "kind": "ClusterBaseModel",
            "metadata": {"name": "there"},
            "spec": {"modelFormat": {"name": "safetensors"}, "storage": storage},
        }
    )
    config = kubeconfig_of(installed, "headrace-model-agent", tmp_path / "agent")
    words = ["--namespace", SYSTEM, "--models-root", str(models), "--listen", f"127.0.0.1:{free_port()}"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [HEADRACE, "model-agent", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NODE_NAME": "one", "KUBECONFIG": str(config)},
        )

    def state() -> Any:
        node = installed.fetch("/api/v1/nodes/one")
        states = installed.fetch(f"/api/v1/namespaces/{SYSTEM}/configmaps/one")
        return states and node["metadata"].get("labels", {}).get("models.ome.io/clusterbasemodel.there")

    try:
        until(lambda: process.poll() is not None or state() == "Ready")
        assert state() == "Ready", log.read_text()
    finally:
        process.terminate()
        code = process.wait(60)
        installed.server.kubectl("delete", "node/one")
        installed.server.kubectl("delete", "clusterbasemodel/there")
    said = log.read_text()
    assert code == 0, said
    assert _unused(installed, AGENT, rights_of("headrace-model-agent")) == []
    assert verbs_of(installed, AGENT)[1] == [], said


MAY: list[tuple[str, str, str, bool]] = [
    (OPERATOR, "create deployments.apps", "default", True),
    (OPERATOR, "patch inferenceservices.ome.io/status", "default", True),
    (OPERATOR, "update leases.coordination.k8s.io", SYSTEM, True),
    (OPERATOR, "update leases.coordination.k8s.io", "default", False),
    (OPERATOR, "update secret/headrace-webhook-certificate", SYSTEM, True),
    (OPERATOR, "get secret/another", SYSTEM, False),
    (OPERATOR, "list secrets", SYSTEM, False),
    (OPERATOR, "get secrets", "default", False),
    (OPERATOR, "create secrets", SYSTEM, False),
    (OPERATOR, "delete inferenceservices.ome.io", "default", False),
    (OPERATOR, "create pods", "default", False),
    (OPERATOR, "create pods/exec", "default", False),
    (OPERATOR, "patch nodes", "", False),
    (OPERATOR, "create clusterroles.rbac.authorization.k8s.io", "", False),
    (OPERATOR, "create clusterrolebindings.rbac.authorization.k8s.io", "", False),
    (OPERATOR, "bind clusterrole/cluster-admin", "", False),
    (OPERATOR, "escalate roles.rbac.authorization.k8s.io", "default", False),
    (OPERATOR, "impersonate users", "", False),
    (OPERATOR, "patch validatingwebhookconfiguration/headrace-operator", "", True),
    (OPERATOR, "patch validatingwebhookconfiguration/another", "", False),
    (OPERATOR, "delete namespace/default", "", False),
    (AGENT, "list clusterbasemodels.ome.io", "", True),
    (AGENT, "patch nodes", "", True),
    (AGENT, "patch configmaps", SYSTEM, True),
    (AGENT, "get configmaps", "default", False),
    (AGENT, "get secrets", SYSTEM, False),
    (AGENT, "get secrets", "default", False),
    (AGENT, "list pods", "default", False),
    (AGENT, "delete nodes", "", False),
    (AGENT, "patch clusterbasemodels.ome.io", "", False),
    (AGENT, "create deployments.apps", "default", False),
]


def test_the_rights_are_small(installed: Any) -> None:
    found = []
    for account, deed, namespace, _ in MAY:
        verb, _, what = deed.partition(" ")
        told = installed._client.post(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            json={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": account, "groups": [], "resourceAttributes": _asked(verb, what, namespace)},
            },
        )
        found.append((account, deed, namespace, told.json()["status"]["allowed"]))
    assert found == MAY
    # And as a person asks it.
    said = installed.server.kubectl("auth", "can-i", "get", "secrets", "-A", f"--as={OPERATOR}", check=False)
    assert said.splitlines()[0] == "no", said


def _asked(verb: str, what: str, namespace: str) -> dict[str, str]:
    """`leases.coordination.k8s.io`, `pods/exec`, or `secret/name`, as the API has it."""
    named = {
        "secret": ("", "secrets"),
        "clusterrole": ("rbac.authorization.k8s.io", "clusterroles"),
        "namespace": ("", "namespaces"),
        "validatingwebhookconfiguration": ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    }
    first, _, rest = what.partition("/")
    asked = {"verb": verb, "namespace": namespace}
    if first in named and rest:
        group, plural = named[first]
        return {**asked, "group": group, "resource": plural, "name": rest}
    plural, _, group = first.partition(".")
    return {**asked, "group": group, "resource": plural, "subresource": rest}


def test_the_agent_reads_the_secrets_that_were_named(installed: Any) -> None:
    from controller_site import until

    installed.server.kubectl(
        "apply", "-f", "-", input=headrace("operator", "manifests", "--replicas=0", "--agent-secret", "hf-token")
    )
    for name, wanted in (("hf-token", "yes"), ("headrace-webhook-certificate", "no")):
        words = ("auth", "can-i", "get", f"secret/{name}", "-n", SYSTEM, f"--as={AGENT}")
        if wanted == "yes":  # it takes the API server a moment to hear of a new right
            until(lambda words=words: installed.server.kubectl(*words, check=False).startswith("yes"))
        assert installed.server.kubectl(*words, check=False).splitlines()[0] == wanted


def test_helm_installs_it(installed: Any) -> None:
    from helm_chart import CHARTS, helm

    server = installed.server
    space = ("-n", SYSTEM)
    # What the API server makes of the objects it says itself; to read its whole schema takes an emulated helm its time.
    chart = (CHARTS / "headrace", *space, "--disable-openapi-validation")
    server.kubectl("delete", "-f", "-", input=headrace("operator", "manifests", "--without", "crds"))
    server.kubectl("create", "namespace", SYSTEM)
    quiet = ("--set", "operator.replicas=2", "--set", "runtimes.enabled=false")
    said = helm("install", "headrace", *chart, *quiet, kubeconfig=server.kubeconfig).stdout
    assert "STATUS: deployed" in said and "does not have our kinds" not in said, said
    assert "kubectl -n headrace-system rollout status" in said
    kinds = "deployment,daemonset,service,secret,configmap,poddisruptionbudget"
    found = set(server.kubectl("get", kinds, *space, "-o", "name", "-l", "app.kubernetes.io/part-of=headrace").split())
    assert found == {
        "deployment.apps/headrace-activator",
        "deployment.apps/headrace-operator",
        "daemonset.apps/headrace-model-agent",
        "service/headrace-operator-webhook",
        "secret/headrace-webhook-certificate",
        "configmap/inferenceservice-config",
        "poddisruptionbudget.policy/headrace-operator",
    }
    # What the operator and people have written stays with an upgrade.
    server.kubectl("patch", "secret", "headrace-webhook-certificate", *space, "-p", '{"data": {"a": "Yg=="}}')
    server.kubectl("patch", "configmap", "inferenceservice-config", *space, "-p", '{"data": {"deploy": "{}"}}')
    more = ("--reuse-values", "--set", "operator.replicas=1")
    helm("upgrade", "headrace", *chart, *more, kubeconfig=server.kubeconfig)
    secret = installed.fetch(f"/api/v1/namespaces/{SYSTEM}/secrets/headrace-webhook-certificate")
    assert secret["data"] == {"a": "Yg=="}
    settings = installed.fetch(f"/api/v1/namespaces/{SYSTEM}/configmaps/inferenceservice-config")
    assert settings["data"].keys() == {"_example", "deploy"}
    assert installed.fetch(f"/apis/policy/v1beta1/namespaces/{SYSTEM}/poddisruptionbudgets/headrace-operator") is None
    helm("uninstall", "headrace", *space, kubeconfig=server.kubeconfig)
    assert server.kubectl("get", "clusterroles", "-o", "name", "-l", "app.kubernetes.io/part-of=headrace") == ""
    assert "inferenceservices.ome.io" in server.kubectl("get", "crds", "-o", "name")
