# SPDX-License-Identifier: Apache-2.0
"""A fake: stands in for the scheduler, a node's kubelet and a cloud's load balancers, beside a real API server.

A pod's command is run as a process of this machine, without any container: with the pod's variables and no others, its
image's name looked at but never pulled. Its network is the machine's own, or with `networks` one of its own, as the kernel
gives it, with an address that this machine reaches. What is real: every object and every status that
passes through the API server, its controllers, and the log, which the API server fetches here over HTTPS as from a kubelet.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import random
import re
import signal
import ssl
import subprocess
import threading
import time
import traceback
import urllib.parse
import urllib.request
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import trustme
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources import core_v1
from lightkube.types import PatchType

from support.kubernetes_server import PATIENCE, KubernetesServer

MISSING = "registry.invalid/"
"""Images that begin so cannot be pulled."""
NODE = "fake-node"
_POLL_SECONDS = 0.05
_MOST_RESTARTS_AT_ONCE = 2
_PROBE_FAILURES = 3
"""In a row, before a pod that was ready is not: the default of a kubelet, since one may merely be late."""
_ADDRESSES = 250 * 250
_HOST_ADDRESS = "10.244.255.254"
"""Of this machine, for pods that have a network of their own."""


@dataclass
class Running:
    """One pod's process."""

    name: str
    namespace: str
    log: Path
    process: subprocess.Popen[bytes]
    restarts: int = 0
    last_status: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    ending_since: float | None = None
    """Since when it is being deleted: its preStop hook comes first, then SIGTERM."""
    hook: subprocess.Popen[bytes] | None = None
    terminated: bool = False
    """Whether it has SIGTERM."""
    ended_since: float | None = None
    started: float = field(default_factory=time.monotonic)
    oom: bool = False
    network: str = ""
    misses: int = _PROBE_FAILURES
    """Probes that failed, one after the other."""


@dataclass(frozen=True)
class Slowness:
    """How slow a node and its network are, in seconds."""

    start: float = 0.0
    """From a pod's process to its readiness, as a model takes that is loaded."""
    stop: float = 0.0
    """From the end of a pod's process to the end of the pod."""
    forget: float = 0.0
    """From the end of an endpoint to the last request that kube-proxy sends to it."""


class FakeKubelet:
    """One node. `started` has the processes by (namespace, pod)."""

    def __init__(
        self,
        server: KubernetesServer,
        folder: Path,
        *,
        gpus: int = 2,
        balance: bool = True,
        networks: bool = False,
        slow: Slowness | None = None,
        entrypoints: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """entrypoints: what containers without a command run, by the beginning of their image's name."""
        self._entrypoints = dict(entrypoints or {})
        self._folder = folder
        self._slow = slow or Slowness()
        self._routes: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
        """By Service: the endpoints that kube-proxy knows, with the time when each was last among them."""
        self._networks = networks
        self._gpus = gpus
        self._balance = balance
        config = KubeConfig.from_file(server.kubeconfig)
        self._client = Client(config, field_manager="fake-kubelet", timeout=PATIENCE)
        self._addresses: dict[str, str] = {}
        """By the uids of pods. From a place of chance: another cluster's pods may have a network on this machine, too."""
        self._first_address = random.randrange(_ADDRESSES)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fake-kubelet")
        self.started: dict[tuple[str, str], Running] = {}
        self.errors: list[str] = []
        self._logs = _log_server(self)

    def __enter__(self) -> FakeKubelet:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._client.create(core_v1.Node(metadata=ObjectMeta(name=NODE)))
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.server_address[1]}},
            "allocatable": {"nvidia.com/gpu": str(self._gpus), "cpu": "8", "memory": "16Gi", "pods": "110"},
            "capacity": {"nvidia.com/gpu": str(self._gpus), "cpu": "8", "memory": "16Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        self._client.patch(core_v1.NodeStatus, NODE, {"status": status}, patch_type=PatchType.MERGE)
        threading.Thread(target=self._logs.serve_forever, args=(0.05,), name="fake-kubelet-logs").start()
        self._thread.start()
        return self

    def __exit__(self, *told: object) -> None:
        self._over.set()
        self._thread.join()
        self._logs.shutdown()
        self._logs.server_close()
        for running in self.started.values():
            _remove(running)
        with contextlib.suppress(ApiError):
            self._client.delete(core_v1.Node, NODE)
        self._client.close()

    def kill(self, pod: str, namespace: str = "default", *, oom: bool = False) -> None:
        """End a pod's program, as the kernel or a stranger would."""
        running = self.started[(namespace, pod)]
        running.oom = oom
        _kill(running.process)

    def endpoints(self, service: str, namespace: str = "default") -> list[tuple[str, int]]:
        """Where kube-proxy sends requests for a Service: also to endpoints that are gone, for a while."""
        now = time.monotonic()
        known = self._routes.get((namespace, service), {})
        return sorted(place for place, last in known.items() if now - last <= self._slow.forget + _POLL_SECONDS * 4)

    # The loop

    def _work(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                seen = set()
                for pod in self._client.list(core_v1.Pod, namespace="*"):
                    seen.add((pod.metadata.namespace, pod.metadata.name))
                    self._one(pod)
                for key in set(self.started) - seen:  # removed by force
                    _remove(self.started.pop(key))
                if self._balance:
                    self._balance_loads()
                if self._slow.forget:
                    self._look_at_endpoints()
            except ApiError as error:
                # Gone or changed meanwhile, or a server that has too much to do: the next look will tell.
                if error.status.code not in (404, 409, 429) and error.status.code < 500:
                    self.errors.append(f"{error}")
            except httpx2.TransportError:
                continue
            except Exception as error:
                self.errors.append(traceback.format_exc())
                if len(self.errors) > 20:
                    raise error from None

    def _one(self, pod: Any) -> None:
        key = (pod.metadata.namespace, pod.metadata.name)
        if pod.metadata.deletionTimestamp is not None:
            self._end(pod, self.started.get(key))
        elif (pod.status.phase or "Pending") in ("Succeeded", "Failed"):
            return
        elif not pod.spec.nodeName:
            self._schedule(pod)
        elif key not in self.started:
            self._start(pod)
        else:
            self._watch(pod, self.started[key])

    def _schedule(self, pod: Any) -> None:
        limits = (pod.spec.containers[0].resources and pod.spec.containers[0].resources.limits) or {}
        if int(limits.get("nvidia.com/gpu", "0")) > self._gpus:
            document = {"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."}
            self._report_status(pod, {"conditions": [{"type": "PodScheduled", "status": "False", **document}]})
            return
        target = ObjectReference(kind="Node", name=NODE)
        binding = core_v1.PodBinding(metadata=ObjectMeta(name=pod.metadata.name), target=target)
        with contextlib.suppress(msgspec.ValidationError):  # lightkube expects a binding back; it is a Status
            self._client.create(binding, pod.metadata.name, namespace=pod.metadata.namespace)

    def _start(self, pod: Any) -> None:
        container = pod.spec.containers[0]
        if container.image.startswith(MISSING):
            self._report_status(
                pod, {"phase": "Pending", "containerStatuses": [_waiting(pod, "ImagePullBackOff", "no such image")]}
            )
            return
        try:
            variables = self._variables(pod)
        except ApiError as error:
            reported = _waiting(pod, "CreateContainerConfigError", str(error))
            self._report_status(pod, {"phase": "Pending", "containerStatuses": [reported]})
            return
        log = self._folder / f"{pod.metadata.uid}.log"
        network = _make_network(pod, self._address(pod)) if self._networks else ""
        process = _run(container, self._entrypoint(container), variables, log, network)
        running = Running(pod.metadata.name, pod.metadata.namespace, log, process, network=network)
        self.started[(running.namespace, running.name)] = running
        self._watch(pod, running)

    def _entrypoint(self, container: Any) -> Sequence[str]:
        return next((words for image, words in self._entrypoints.items() if container.image.startswith(image)), ())

    def _variables(self, pod: Any) -> dict[str, str]:
        container = pod.spec.containers[0]
        document: dict[str, str] = {}
        for source in container.envFrom or ():
            secret = self._client.get(core_v1.Secret, source.secretRef.name, namespace=pod.metadata.namespace)
            document |= {name: b64decode(value).decode() for name, value in (secret.data or {}).items()}
        for variable in container.env or ():
            document[variable.name] = expand(variable.value or "", document)
        return {"PATH": os.environ["PATH"], **document}

    def _watch(self, pod: Any, running: Running) -> None:
        code = running.process.poll()
        if code is None:
            loaded = time.monotonic() - running.started >= self._slow.start
            answers = loaded and _probe(pod, self._address(pod) if running.network else "127.0.0.1")
            running.misses = 0 if answers else running.misses + 1
            state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            self._report_status(
                pod, self._status(pod, running, "Running", state, ready=running.misses < _PROBE_FAILURES)
            )
            return
        running.misses = _PROBE_FAILURES
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
        if running.oom:
            ended["reason"] = "OOMKilled"
        if pod.spec.restartPolicy == "Never":
            self._report_status(
                pod, self._status(pod, running, "Succeeded" if code == 0 else "Failed", {"terminated": ended})
            )
        elif running.restarts < _MOST_RESTARTS_AT_ONCE:
            running.restarts += 1
            running.last = {"terminated": ended}
            container = pod.spec.containers[0]
            entrypoint = self._entrypoint(container)
            running.process = _run(container, entrypoint, self._variables(pod), running.log, running.network)
        else:
            running.last = {"terminated": ended}
            wait = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
            self._report_status(pod, self._status(pod, running, "Running", wait))

    def _end(self, pod: Any, running: Running | None) -> None:
        if running is not None and running.process.poll() is None:
            if running.ending_since is None:
                running.ending_since = time.monotonic()
                running.hook = _run_hook(pod.spec.containers[0], self._variables(pod), running)
            # Whoever deletes it again may have shortened the grace meanwhile.
            elif time.monotonic() > running.ending_since + (pod.metadata.deletionGracePeriodSeconds or 0):
                _kill(running.process)
            if not running.terminated and (running.hook is None or running.hook.poll() is not None):
                running.terminated = True
                running.process.send_signal(signal.SIGTERM)
            return
        if running is not None and self._slow.stop:
            if running.ended_since is None:
                running.ended_since = time.monotonic()
            if time.monotonic() < running.ended_since + self._slow.stop:
                return
        if running is not None:
            _remove(running)
            del self.started[(running.namespace, running.name)]
        self._client.delete(core_v1.Pod, pod.metadata.name, namespace=pod.metadata.namespace, grace_period=0)

    def _report_status(self, pod: Any, status: dict[str, Any]) -> None:
        running = self.started.get((pod.metadata.namespace, pod.metadata.name))
        if running is not None and running.last_status == status:
            return
        name, namespace = pod.metadata.name, pod.metadata.namespace
        self._client.patch(core_v1.PodStatus, name, {"status": status}, namespace=namespace, patch_type=PatchType.MERGE)
        if running is not None:
            running.last_status = status

    def _address(self, pod: Any) -> str:
        """No two of them have the same."""
        number = (self._first_address + len(self._addresses)) % _ADDRESSES
        return self._addresses.setdefault(pod.metadata.uid, f"10.244.{number // 250}.{number % 250 + 2}")

    def _status(
        self, pod: Any, running: Running, phase: str, state: dict[str, Any], *, ready: bool = False
    ) -> dict[str, Any]:
        answer = "True" if ready else "False"
        return {
            "phase": phase,
            "podIP": self._address(pod),
            "podIPs": [{"ip": self._address(pod)}],
            "hostIP": "127.0.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Initialized", "status": "True"},
                {"type": "ContainersReady", "status": answer},
                {"type": "Ready", "status": answer},
            ],
            "containerStatuses": [
                {
                    "name": pod.spec.containers[0].name,
                    "image": pod.spec.containers[0].image,
                    "imageID": "fake",
                    "ready": ready,
                    "restartCount": running.restarts,
                    "state": state,
                    "lastState": running.last,
                }
            ],
        }

    def _balance_loads(self) -> None:
        """Give an address to each Service of type LoadBalancer as soon as the endpoints controller found it a ready pod."""
        for service in self._client.list(core_v1.Service, namespace="*"):
            if service.spec.type != "LoadBalancer" or (
                service.status.loadBalancer and service.status.loadBalancer.ingress
            ):
                continue
            name, namespace = service.metadata.name, service.metadata.namespace
            result = self._client.get(core_v1.Endpoints, name, namespace=namespace)
            ready = [address.ip for subset in result.subsets or () for address in subset.addresses or ()]
            if ready:
                ip = ready[0] if self._networks else "127.0.0.1"
                status = {"status": {"loadBalancer": {"ingress": [{"ip": ip}]}}}
                self._client.patch(core_v1.ServiceStatus, name, status, namespace=namespace, patch_type=PatchType.MERGE)

    def _look_at_endpoints(self) -> None:
        now = time.monotonic()
        for found in self._client.list(core_v1.Endpoints, namespace="*"):
            known = self._routes.setdefault((found.metadata.namespace, found.metadata.name), {})
            for subset in found.subsets or ():
                for address in subset.addresses or ():
                    for port in subset.ports or ():
                        known[address.ip, port.port] = now


def expand(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it: `$(NAME)` is a variable if there is one, `$$` is `$`, and all else stays."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


def _run(
    container: Any, entrypoint: Sequence[str], variables: dict[str, str], log: Path, network: str
) -> subprocess.Popen[bytes]:
    arguments = [expand(word, variables) for word in [*(container.command or entrypoint), *(container.args or ())]]
    if network:
        arguments = ["nsenter", f"--net=/run/netns/{network}", "--", *arguments]
    with log.open("ab") as file:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=variables,
            cwd="/",
            start_new_session=True,
        )


def _run_hook(container: Any, variables: dict[str, str], running: Running) -> subprocess.Popen[bytes] | None:
    """Start the container's preStop hook, if it is a command."""
    hook = container.lifecycle.preStop if container.lifecycle is not None else None
    if hook is None or hook.exec is None:
        return None
    words = [expand(word, variables) for word in hook.exec.command or ()]
    with running.log.open("ab") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables, cwd="/", start_new_session=True
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove(running: Running) -> None:
    _kill(running.process)
    if running.hook is not None:
        _kill(running.hook)
    if running.network:
        # The pair of links would go with the network, but a while later.
        for words in (("link", "delete"), ("netns", "delete")):
            subprocess.run(["ip", *words, running.network], check=True, capture_output=True)


def _make_network(pod: Any, address: str) -> str:
    """A network of the pod's own, joined to the machine's by a pair of links."""
    name = f"hr-{pod.metadata.uid[:8]}"
    for line in (
        f"netns add {name}",
        f"link add {name} type veth peer name eth0 netns {name}",
        f"link set {name} up",
        f"-n {name} link set lo up",
        f"-n {name} link set eth0 up",
        f"-n {name} address add {address}/32 dev eth0",
        f"-n {name} route add {_HOST_ADDRESS}/32 dev eth0",
        f"address add {_HOST_ADDRESS}/32 dev {name}",
        f"route add {address}/32 dev {name} src {_HOST_ADDRESS}",
    ):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)
    return name


def _probe(pod: Any, host: str) -> bool:
    container = pod.spec.containers[0]
    probe = container.readinessProbe
    if probe is None or probe.httpGet is None:
        return True
    port = next(port.containerPort for port in container.ports if probe.httpGet.port in (port.name, port.containerPort))
    try:
        # A kubelet goes by the code alone: 200 to 399.
        return urllib.request.urlopen(f"http://{host}:{port}{probe.httpGet.path}", timeout=5).status < 400
    except (OSError, http.client.HTTPException):
        return False


def _waiting(pod: Any, reason: str, message: str) -> dict[str, Any]:
    container = pod.spec.containers[0]
    return {
        "name": container.name,
        "image": container.image,
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}},
    }


def _log_server(kubelet: FakeKubelet) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            words = url.path.split("/")
            running = kubelet.started.get((words[2], words[3])) if words[1] == "containerLogs" else None
            lines = running.log.read_bytes().splitlines(keepends=True) if running else []
            tail = urllib.parse.parse_qs(url.query).get("tailLines")
            if tail:
                lines = lines[-int(tail[0]) :] if int(tail[0]) else []
            body = b"".join(lines)
            self.send_response(200 if running else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server
