# SPDX-License-Identifier: Apache-2.0
"""What the driver `kubernetes` says where there is no cluster to talk to: no package, no kubeconfig, nobody there."""

from __future__ import annotations

import asyncio
import http.server
import json
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.platforms.contract import Check, Container, Handle, LaunchSpec
from headrace.platforms.kubernetes.driver import KubernetesDriver
from headrace.platforms.kubernetes.settings import KubernetesSettings
from headrace.platforms.kubernetes.status import service_url
from support.ports import free_port


def kubeconfig(path: Path, server: str) -> Path:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return path


def assert_every_call_fails(path: Path, kind: type[HeadraceError], text: str, **given: str) -> list[Check]:
    """Every call says the same; what preflight says."""

    async def main() -> list[Check]:
        driver = KubernetesDriver(KubernetesSettings(kubeconfig=str(path), **given))
        handle = Handle(str(uuid.uuid4()), driver.name)
        spec = LaunchSpec(handle.job_id, container=Container("a:1", "x"))
        calls = (driver.start(spec), driver.status(handle), driver.logs(handle, 1), driver.endpoint(handle))
        for call in (*calls, driver.stop(handle, 1.0), driver.list_services()):
            with pytest.raises(kind, match=text):
                await call
        checks = await driver.preflight()
        assert driver.place.startswith("kubernetes:")
        await driver.close()
        return checks

    return asyncio.run(main())


def test_no_kubeconfig(tmp_path: Path) -> None:
    checks = assert_every_call_fails(tmp_path / "none", FailedPrecondition, "no kubeconfig at .*none: set KUBECONFIG")
    assert [(check.name, check.passed) for check in checks] == [("kubeconfig", False)]


@pytest.mark.parametrize("text", ["clusters: [", "[]", "{}", "a: b", '{"clusters": [], "contexts": []}', "\0"])
def test_a_kubeconfig_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    assert_every_call_fails(path, FailedPrecondition, "the kubeconfig cannot be used")


def test_a_context_that_is_not_there(tmp_path: Path) -> None:
    assert_every_call_fails(
        kubeconfig(tmp_path / "config", "http://127.0.0.1:1"), FailedPrecondition, "context 'other'", context="other"
    )


def test_the_first_kubeconfig_that_exists_counts(tmp_path: Path) -> None:
    there = kubeconfig(tmp_path / "there", "http://127.0.0.1:1")
    driver = KubernetesDriver(KubernetesSettings(kubeconfig=f"{tmp_path / 'none'}:{there}"))
    assert driver.place == "kubernetes:http://127.0.0.1:1:default:job"


def test_certificates_that_are_none(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://127.0.0.1:1")
    config = json.loads(path.read_text())
    config["clusters"][0]["cluster"]["certificate-authority"] = str(tmp_path / "missing.crt")
    path.write_text(json.dumps(config))
    assert_every_call_fails(path, FailedPrecondition, "certificates cannot be used")


def test_api_server_unreachable(tmp_path: Path) -> None:
    port = free_port()
    checks = assert_every_call_fails(
        kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port}"), Unavailable, f"127.0.0.1:{port} does not answer"
    )
    assert [(check.name, check.passed) for check in checks] == [("kubeconfig", True), ("cluster", False)]


def test_no_httpx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert_every_call_fails(
        kubeconfig(tmp_path / "config", "http://127.0.0.1:1"),
        FailedPrecondition,
        r"pip install 'headrace\[kubernetes\]'",
    )


@pytest.fixture(params=[200, 403, 502])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """Some proxy's page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<html>Please log in</html>"
            self.send_response(request.param)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PATCH = do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_something_else_answers(tmp_path: Path, stranger: str) -> None:
    async def main() -> None:
        driver = KubernetesDriver(KubernetesSettings(kubeconfig=str(kubeconfig(tmp_path / "config", stranger))))
        handle = Handle(str(uuid.uuid4()), driver.name)
        spec = LaunchSpec(handle.job_id, container=Container("a:1", "x"))
        for call in (driver.start(spec), driver.status(handle), driver.list_services()):
            with pytest.raises(HeadraceError, match="in namespace default: "):
                await call
        assert not all(check.passed for check in await driver.preflight())
        await driver.close()

    asyncio.run(main())


def test_addresses_as_clusters_give_them() -> None:
    def service(kind: str, ingress: dict[str, str] | None = None) -> dict[str, object]:
        return {
            "metadata": {"name": "s"},
            "spec": {"type": kind, "ports": [{"port": 8080, "nodePort": 30_000}]},
            "status": {"loadBalancer": {"ingress": [ingress]} if ingress else {}},
        }

    settings = KubernetesSettings(namespace="n")
    pod = {"status": {"hostIP": "10.0.0.5"}}
    assert service_url(service("LoadBalancer"), pod, settings) is None
    assert service_url(service("LoadBalancer", {"ip": "1.2.3.4"}), pod, settings) == "http://1.2.3.4:8080"
    assert service_url(service("LoadBalancer", {"hostname": "x.elb"}), None, settings) == "http://x.elb:8080"
    assert service_url(service("LoadBalancer", {"ip": "fd00::1"}), None, settings) == "http://[fd00::1]:8080"
    assert service_url(service("NodePort"), None, settings) is None
    assert service_url(service("NodePort"), pod, settings) == "http://10.0.0.5:30000"
    assert service_url(service("NodePort"), pod, KubernetesSettings(node_host="gate")) == "http://gate:30000"
    assert service_url(service("ClusterIP"), pod, settings) == "http://s.n.svc:8080"
