# SPDX-License-Identifier: Apache-2.0
"""A cluster with a controller in it, for tests: the real API server, our kinds, others as bare CRDs."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import yaml
from lightkube import ApiError as LightkubeError

from headrace.fleet.cluster.resources import CHILDREN
from headrace.fleet.names import SERVICE_LABEL
from headrace.fleet.planning.shared_activator import MANAGER, SLICE_MANAGER
from headrace.fleet.schema.crds import crds
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import Resource, ServedResource
from headrace.programs.operator import Controller, OperatorSettings
from support.kubernetes_server import KubernetesServer
from support.waiting import eventually

FLEET = Path(__file__).parents[3] / "headrace" / "fleet"
SERVICES = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices"
FOREIGN = [each for each in CHILDREN if each.capability]
REPLICA_SETS = ServedResource(Resource("apps", ("v1",), "ReplicaSet", "replicasets"), "v1")


NAME = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
SPECS = {
    "InferencePool": {
        "required": ["selector", "targetPorts", "endpointPickerRef"],
        "properties": {
            "selector": {"type": "object", "required": ["matchLabels"], "properties": {"matchLabels": LABELS}},
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
            "endpointPickerRef": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "group": {"type": "string", "maxLength": 253},
                    "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                    "name": NAME,
                    "port": PORT,
                    "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"]},
                },
            },
        },
    },
    "InferenceObjective": {
        "required": ["poolRef"],
        "properties": {
            "priority": {"type": "integer"},
            "poolRef": {
                "type": "object",
                "required": ["name"],
                "properties": {"group": {"type": "string"}, "kind": {"type": "string"}, "name": NAME},
            },
        },
    },
}
"""What the kinds of the Gateway API Inference Extension check and keep: a field that is not here would be dropped."""


def foreign_schema(kind: str) -> dict[str, Any]:
    """The schema of a kind of others; most have none here."""
    if kind not in SPECS:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {"type": "object", **SPECS[kind]}
    return {"type": "object", "required": ["spec"], "properties": {"spec": spec}}


def foreign_crd(kind: Any) -> dict[str, Any]:
    """A kind of Knative and the like: nobody acts on it here."""
    version = {
        "name": kind.versions[0],
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": foreign_schema(kind.kind)},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()},
            "versions": [version],
        },
    }


def install(server: KubernetesServer, foreign: list[Any] = FOREIGN) -> None:
    """Our kinds and those of others, ready to be used."""
    documents = [*crds().values(), *(foreign_crd(each) for each in foreign)]
    server.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))
    site = Site(server)
    for each in documents:
        spec = each["spec"]
        until(lambda spec=spec: site.has(spec["group"], spec["versions"][0]["name"], spec["names"]["plural"]) is True)
    site.close()


def until(look: Callable[[], Any], seconds: float = 180.0) -> Any:
    """What `look` returns, once it is true. The cluster's garbage collector takes up to a minute to know of new kinds."""
    return eventually(look, within=seconds)


class Killed(httpx2.ConnectError):
    """The controller's end, at a call of the test's choice: from then on nothing that it does comes through."""


class CountingTransport(httpx2.AsyncBaseTransport):
    """Passes calls on; notes writes, and may end the controller before one of them."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self.inner = inner
        self.writes: list[str] = []
        self.left: int | None = None
        self.down = False
        self.under_way = 0
        """Writes that have no answer yet."""
        self.lost = 0
        """Calls that nobody answered."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.down:
            raise httpx2.ConnectError("the test has cut the wire", request=request)
        writes = request.method != "GET"
        if writes and self.left is not None and self.left <= 0:
            raise Killed("killed", request=request)
        if writes:
            self.writes.append(f"{request.method} {request.url.path}")
            if self.left is not None:
                self.left -= 1
        self.under_way += writes
        try:
            return await self.inner.handle_async_request(request)
        except httpx2.TransportError:
            self.lost += 1
            raise
        finally:
            self.under_way -= writes

    async def aclose(self) -> None:
        await self.inner.aclose()


async def at_rest(eyes: ApiClient, controller: Controller) -> bool:
    """Whether a controller has seen all that the API server holds, and the cluster's own controllers have no work left.

    On a busy machine a watch may be late, and so may they: what they tell of a Deployment is told of its service in turn.
    """
    held: dict[str, dict[str, Any]] = {}
    try:
        for each in list(controller._view._informers.values()):
            found, _ = await eyes.list(each.served, each._selector)
            if _versions(found) != _versions(each.all()):
                return False
            held.setdefault(each.served.resource.kind, {}).update({one["metadata"]["uid"]: one for one in found})
        sets, _ = await eyes.list(REPLICA_SETS, SERVICE_LABEL)
    except (ApiError, Unreachable):
        return False  # a kind that has just gone, or the whole server
    pods, deployments, jobs, scalers = (
        list(held.get(each, {}).values()) for each in ("Pod", "Deployment", "Job", "HorizontalPodAutoscaler")
    )
    owners = {each["metadata"]["uid"] for each in (*deployments, *jobs, *sets)}
    return (
        all(_owner(each) in owners for each in (*pods, *sets))  # what nobody owns is about to be collected
        and all(_is_counted(each, pods) for each in deployments)
        and all(_is_told(each, pods) for each in jobs)
        and all(_has_scaled(each, deployments) for each in scalers)
    )


def _versions(documents: list[Any]) -> set[tuple[str, str]]:
    return {(each["metadata"]["uid"], each["metadata"]["resourceVersion"]) for each in documents}


def _owner(document: Any) -> str:
    return str(document["metadata"].get("ownerReferences", [{}])[0].get("uid", ""))


def _is_counted(deployment: Any, pods: list[Any]) -> bool:
    """Whether a Deployment has its pods, and tells of them as they are."""
    wanted, told = deployment["spec"]["replicas"], deployment["status"]
    labels = deployment["spec"]["selector"]["matchLabels"].items()
    own = [each for each in pods if labels <= each["metadata"]["labels"].items()]
    up = sum(is_ready(each) for each in own)
    return (
        told.get("observedGeneration") == deployment["metadata"]["generation"]
        and told.get("replicas", 0) == len(own) >= wanted
        and told.get("updatedReplicas", 0) >= min(1, wanted)
        and told.get("readyReplicas", 0) == told.get("availableReplicas", 0) == up
    )


def _has_scaled(scaler: Any, deployments: list[Any]) -> bool:
    """Whether there are as many replicas as there are to be at least: there are no metrics that could ask for more.

    A HorizontalPodAutoscaler has its first look 15 s after it was made, and the operator tells of its conditions. Nobody
    acts on those of a newer API, which are custom resources here.
    """
    if scaler["apiVersion"] == "autoscaling/v2beta2" and not scaler.get("status", {}).get("conditions"):
        return False
    name, least = scaler["spec"]["scaleTargetRef"]["name"], scaler["spec"].get("minReplicas", 1)
    counts = [each["spec"]["replicas"] for each in deployments if each["metadata"]["name"] == name]
    return all(each == 0 or each >= least for each in counts)


def _is_told(job: Any, pods: list[Any]) -> bool:
    """Whether a Job is over, or has its pod and tells of it."""
    own = [each for each in pods if _owner(each) == job["metadata"]["uid"]]
    at_work = sum(each["status"]["phase"] not in ("Succeeded", "Failed") for each in own)
    return bool(job["status"].get("conditions")) or job["status"].get("active", 0) == at_work == 1


def is_ready(pod: Any) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


class Running:
    """A controller in a thread of its own."""

    def __init__(
        self, kubeconfig: Path, settings: OperatorSettings | None = None, *, writes: int | None = None
    ) -> None:
        self._kubeconfig = kubeconfig
        self._settings = settings or OperatorSettings(discover_seconds=1.0)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="controller")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._allowed = writes
        self._eyes: ApiClient | None = None
        """The test's own: what it asks is not counted as the controller's."""
        self.controller: Controller | None = None
        self.transport: CountingTransport | None = None
        self.failure: BaseException | None = None

    def __enter__(self) -> Running:
        self._thread.start()
        until(lambda: self.controller is not None or not self._thread.is_alive())
        return self

    def __exit__(self, *told: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def writes(self) -> list[str]:
        assert self.transport is not None
        return list(self.transport.writes)

    @property
    def lost(self) -> int:
        assert self.transport is not None
        return self.transport.lost

    @property
    def dead(self) -> bool:
        """Whether it has made all the writes that it may, and has their answers."""
        transport = self.transport
        return transport is not None and transport.left is not None and transport.left <= 0 and not transport.under_way

    def settle(self, seconds: float = 180.0) -> None:
        """Return when all is at rest, and the controller had nothing to do for a moment."""

        def quiet() -> bool:
            count = len(self.writes)
            if not self._at_rest():
                return False
            time.sleep(0.4)
            return self._at_rest() and len(self.writes) == count

        until(quiet, seconds)

    def _at_rest(self) -> bool:
        assert self._loop is not None and self.controller is not None and self._eyes is not None
        if not self.controller.settled:
            return False
        asked = asyncio.run_coroutine_threadsafe(at_rest(self._eyes, self.controller), self._loop)
        return asked.result(120) and self.controller.settled

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        api: ApiClient = connect(str(self._kubeconfig))
        client = api._client
        self.transport = client._transport = CountingTransport(client._transport)
        self.transport.left = self._allowed
        self._eyes = connect(str(self._kubeconfig.with_name("kubeconfig")))  # the administrator's, who sees all
        self.controller = Controller(api, self._settings)
        work = asyncio.create_task(self.controller.run())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        stopped.cancel()
        (ended, _) = await asyncio.gather(work, stopped, return_exceptions=True)
        if isinstance(ended, Exception):
            self.failure = ended
        await api.close()
        await self._eyes.close()
        # A connection that was being opened when its task was cancelled is nobody's: the HTTP client forgets it.
        for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0)


class Site:
    """Short ways to look at a cluster and to change it."""

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server
        config = yaml.safe_load(server.kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._client = httpx2.Client(
            base_url=cluster["server"], verify=context, headers={"Authorization": "Bearer admintoken"}, timeout=30
        )

    def close(self) -> None:
        self._client.close()

    def apply(self, *documents: Any) -> None:
        self.server.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(documents))

    def sample(self, name: str) -> list[Any]:
        return list(yaml.safe_load_all((FLEET / "samples" / f"{name}.yaml").read_text()))

    def runtimes(self) -> None:
        self.server.kubectl("apply", "-f", str(FLEET / "runtimes"))

    def fetch(self, path: str) -> Any:
        """What the API server has at a path; None if nothing."""
        answer = self._client.get(path)
        return answer.json() if answer.status_code == 200 else None

    def reachable(self) -> bool:
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    def service(self, name: str) -> Any:
        return self.fetch(f"{SERVICES}/{name}")

    def pods(self, service: str) -> list[Any]:
        return self.fetch(f"/api/v1/pods?labelSelector=ome.io/inferenceservice={service}")["items"]

    def children(self) -> dict[str, str]:
        """All objects of services, with their versions: `Deployment.apps default/x` to `1234`."""
        return dict(self._children())

    def events(self, name: str) -> list[Any]:
        """What was told about a service."""
        uid = self.service(name)["metadata"]["uid"]  # not one of the same name before it
        return self.fetch(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid={uid}")["items"]

    def ready(self, name: str) -> dict[str, Any]:
        service = self.service(name) or {}
        conditions = service.get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == "Ready"), {})

    def mark_pods(self, service: str) -> None:
        """All pods of a service become ready, as soon as there are as many as its Deployments ask for."""

        def marked() -> bool:
            pods = self.pods(service)
            for each in pods:
                self.mark_pod(each)
            found = self.fetch(f"/apis/apps/v1/deployments?labelSelector={SERVICE_LABEL}={service}")["items"]
            wanted = sum(each["spec"]["replicas"] for each in found)
            return bool(pods) and len(pods) >= wanted and all(is_ready(each) for each in pods)

        until(marked)

    def mark_pod(self, pod: Any) -> None:
        """A pod is ready, unless it is gone again."""
        if is_ready(pod):
            return
        try:
            self.server.mark_ready(pod["metadata"]["name"], pod["metadata"]["namespace"])
        except LightkubeError as error:
            if error.status.code != 404:
                raise

    def has(self, group: str, version: str, plural: str) -> bool | None:
        """Whether the API server has a kind: True or False when all of it says the same, None while it is of two minds."""
        groups = (self.fetch("/apis") or {}).get("groups", ())
        offered = any(
            each["name"] == group and version in [one["version"] for one in each["versions"]] for each in groups
        )
        listed = (self.fetch(f"/apis/{group}/{version}") or {}).get("resources", ())
        told = {
            offered and any(each["name"] == plural for each in listed),
            self.fetch(f"/apis/{group}/{version}/{plural}") is not None,
        }
        return told.pop() if len(told) == 1 else None

    def bring(self, kind: Resource) -> None:
        """Somebody else's kind is installed, or is there."""
        self.apply(foreign_crd(kind))
        until(lambda: self.has(kind.group, kind.versions[0], kind.plural) is True)

    def take(self, kind: Resource) -> None:
        """It is gone, with all of its objects."""
        self.server.kubectl("delete", "crd", f"{kind.plural}.{kind.group}")
        until(lambda: self.has(kind.group, kind.versions[0], kind.plural) is False)

    def _children(self) -> Iterator[tuple[str, str]]:
        for each in CHILDREN:
            for version in each.versions:
                root = f"/apis/{each.group}" if each.group else "/api"
                found = self.fetch(f"{root}/{version}/{each.plural}?labelSelector=ome.io/inferenceservice")
                for one in found["items"] if found else ():
                    metadata = one["metadata"]
                    if metadata["labels"].get(SLICE_MANAGER, MANAGER) != MANAGER:
                        continue  # Kubernetes' own, with the labels of the Service
                    name = f"{each.kind}.{each.group} {metadata['namespace']}/{metadata['name']}"
                    yield name, metadata["resourceVersion"]
                if found:
                    break
