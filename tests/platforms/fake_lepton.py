# SPDX-License-Identifier: Apache-2.0
"""FakeLepton: an HTTP server that speaks the documented API of a DGX Cloud Lepton workspace; not the platform itself.

The paths, fields and states of the public Python SDK; what is not known is refused. A replica is a process of this machine
without any container: the image is only looked at, and a container's port is the process's own.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

SPEC = {
    "container": {"image", "ports", "command"},
    "resource_requirement": {"resource_shape", "min_replicas", "max_replicas", "shared_memory_size", "affinity"},
    "envs": {"name", "value", "value_from"},
    "mounts": {"path", "from", "mount_path", "mount_options"},
    "log": {"enable_collection", "save_termination_logs"},
    "health": {"liveness", "readiness"},
    "api_tokens": {"value", "value_from"},
    "image_pull_secrets": None,
    "allow_unauthenticated_access": None,
}
IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:@-]*")


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Replica:
    """One deployment and the process that it runs."""

    def __init__(self, body: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
        self.body = body
        self.name = body["metadata"]["name"]
        self.port = body["spec"]["container"]["ports"][0]["container_port"]
        self.log = folder / f"{self.name}.log"
        self.terminations: list[dict[str, Any]] = []
        self.deleting = False
        self.began = time.time()
        self.process: subprocess.Popen[bytes] | None = None
        if body["spec"]["container"]["image"].startswith("no-such/"):
            return
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                body["spec"]["container"]["command"],
                env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=folder,
            )

    @property
    def state(self) -> str:
        if self.deleting:
            return "Deleting"
        if self.process is None:
            return "Not Ready"
        code = self.process.poll()
        if code is not None:
            if not self.terminations:
                document = {"started_at": int(self.began), "finished_at": int(time.time())}
                shown = 128 - code if code < 0 else code
                reason = "Completed" if code == 0 else "Error"
                self.terminations.append({**document, "exit_code": shown, "reason": reason, "message": ""})
            return "Not Ready"
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return "Ready" if probe.connect_ex(("127.0.0.1", self.port)) == 0 else "Starting"

    def document(self) -> dict[str, Any]:
        endpoint = {"internal_endpoint": "", "external_endpoint": f"http://127.0.0.1:{self.port}/"}
        metadata = {**self.body["metadata"], "id": self.name, "created_at": int(self.began)}
        return {"metadata": metadata, "spec": self.body["spec"], "status": {"state": self.state, "endpoint": endpoint}}

    def take_down(self) -> None:
        """SIGTERM, and SIGKILL a second later."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        self.process.wait()


class FakeLepton:
    """The workspace `ws` behind the token `lepton-token`; use as a context manager."""

    workspace, token = "ws", "lepton-token"

    def __init__(self) -> None:
        self.deployments: dict[str, Replica] = {}
        self.secrets: dict[str, str] = {}
        self.pull_secrets = ["tao-image-pull-secret"]
        self.lock = threading.RLock()
        self.calls: list[tuple[str, str]] = []
        self.broken = 0
        """How many of the next requests are answered with 500."""

    def __enter__(self) -> FakeLepton:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.serve(self)

            def do_POST(self) -> None:
                fake.serve(self)

            def do_DELETE(self) -> None:
                fake.serve(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *told: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for replica in list(self.deployments.values()):  # those that are being deleted leave meanwhile
            replica.take_down()
        self._folder.cleanup()

    # What tests do to it

    def kill(self, name: str) -> None:
        process = self.deployments[name].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def resources(self) -> set[str]:
        with self.lock:
            return {*(f"deployment {name}" for name in self.deployments), *(f"secret {name}" for name in self.secrets)}

    # The API

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        try:
            status, told = self.answer(handler.command, handler.path, handler.headers.get("Authorization"), raw)
        except Refused as refused:
            status, told = refused.status, {"code": "Refused", "message": refused.message}
        body = b"" if told is None else json.dumps(told).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def answer(self, method: str, target: str, authorization: str | None, raw: bytes) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        self.calls.append((method, path))
        if self.broken:
            self.broken -= 1
            raise Refused(500, "the gateway is out of order")
        if authorization != f"Bearer {self.token}":
            raise Refused(401, "unauthorized")
        root = f"/api/v2/workspaces/{self.workspace}/"
        if not path.startswith(root):
            raise Refused(404, "workspace not found")
        body = json.loads(raw) if raw else None
        match (method, *path.removeprefix(root).split("/")):
            case ("GET", "workspace"):
                return 200, {"workspace_name": self.workspace, "git_commit": "1.2.3", "build_time": ""}
            case ("GET", "imagepullsecrets"):
                return 200, [{"metadata": {"id": name, "name": name}} for name in self.pull_secrets]
            case ("GET", "usersecrets"):
                return 200, [{"name": name} for name in self.secrets]
            case ("POST", "usersecrets"):
                return 200, self.add_secrets(body)
            case ("DELETE", "usersecrets", name):
                if self.secrets.pop(name, None) is None:
                    raise Refused(404, "no such secret")
                return 200, None
            case ("GET", "deployments"):
                with self.lock:
                    return 200, [replica.document() for replica in self.deployments.values()]
            case ("POST", "deployments"):
                return 201, self.create(body)
            case ("GET", "logs"):
                return 200, self.logs(dict(urllib.parse.parse_qsl(query)))
            case ("GET", "deployments", name):
                return 200, self.replica(name).document()
            case ("GET", "deployments", name, "termination"):
                replica = self.replica(name)
                return 200, {f"{name}-0": replica.terminations} if replica.terminations else {}
            case ("GET", "deployments", name, "readiness"):
                pulling = {"reason": "ConfigError", "message": "ImagePullBackOff", "creationTimestamp": 1}
                return 200, {f"{name}-0": [pulling] if self.replica(name).process is None else []}
            case ("DELETE", "deployments", name):
                self.remove(self.replica(name))
                return 200, None
        raise Refused(404, "no such path")

    def replica(self, name: str) -> Replica:
        with self.lock:
            if name not in self.deployments:
                raise Refused(404, f"deployment {name} not found")
            return self.deployments[name]

    def add_secrets(self, body: Any) -> None:
        with self.lock:
            for item in body:
                if set(item) - {"name", "value", "tags", "owner", "visibility"}:
                    raise Refused(400, "unknown field of a secret")
                if item["name"] in self.secrets:
                    raise Refused(409, "this secret is there")
            self.secrets.update({item["name"]: item["value"] for item in body})

    def create(self, body: Any) -> Any:
        self.check(body)
        name = body["metadata"]["name"]
        with self.lock:
            if name in self.deployments:
                raise Refused(409, f"deployment {name} exists")
            environment = {}
            for variable in body["spec"].get("envs", ()):
                if "value_from" in variable:
                    reference = variable["value_from"]["secret_name_ref"]
                    if reference not in self.secrets:
                        raise Refused(400, "no such secret")
                    environment[variable["name"]] = self.secrets[reference]
                else:
                    environment[variable["name"]] = variable["value"]
            self.deployments[name] = Replica(body, environment, self.folder)
            return self.deployments[name].document()

    def check(self, body: Any) -> None:
        if set(body) != {"metadata", "spec"} or set(body["metadata"]) - {"name", "visibility", "labels"}:
            raise Refused(400, "unknown field")
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,35}", body["metadata"]["name"]):
            raise Refused(400, "a name has at most 36 characters and begins with a letter")
        spec = body["spec"]
        for key, value in spec.items():
            if key not in SPEC:
                raise Refused(400, f"unknown field {key}")
            known = SPEC[key]
            for item in value if isinstance(value, list) else [value]:
                if known is not None and set(item) - known:
                    raise Refused(400, f"unknown field of {key}")
        if not IMAGE.fullmatch(spec["container"]["image"]):
            raise Refused(400, "no image has this name")
        for key in ("path", "mount_path"):
            if any(not str(mount[key]).startswith("/") for mount in spec.get("mounts", ())):
                raise Refused(400, "paths of mounts begin with a slash")

    def remove(self, replica: Replica) -> None:
        if replica.deleting:
            raise Refused(409, "it is being deleted")
        replica.deleting = True

        def end() -> None:
            replica.take_down()
            with self.lock:
                self.deployments.pop(replica.name, None)
            replica.log.unlink(missing_ok=True)

        threading.Thread(target=end).start()

    def logs(self, asked: dict[str, str]) -> Any:
        if set(asked) - {"deployment", "start", "end", "limit", "direction", "q", "replica"}:
            raise Refused(400, "unknown parameter")
        if int(asked["end"]) <= int(asked["start"]):
            raise Refused(400, "end must be after start")
        replica = self.replica(asked["deployment"])
        lines = []
        with contextlib.suppress(FileNotFoundError):  # of one that is not begun, or just gone
            lines = replica.log.read_text(errors="replace").splitlines()
        base = int(replica.began * 10**9)
        values = [[str(base + number), line] for number, line in enumerate(lines)]
        values = values[::-1][: int(asked.get("limit", 5000))]
        return {"status": "success", "data": {"resultType": "streams", "result": [{"stream": {}, "values": values}]}}
