# SPDX-License-Identifier: Apache-2.0
"""Find and read the kubeconfig (the one given, a pod's service account, or the user's own), and log in as its user."""

from __future__ import annotations

import base64
import json
import logging
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.core.extras import MissingExtra
from headrace.core.yaml_loader import load_yaml
from headrace.platforms.commands import run_command
from headrace.platforms.kubernetes_client.objects import EMPTY, Document, get_list, get_mapping, get_str

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Auth, Request, Response

log = logging.getLogger("headrace.launch")

_POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_PATH = "~/.kube/config"


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """One context of a kubeconfig: a server and a user."""

    cluster: Document
    user: Document
    namespace: str
    folder: Path
    """Of the kubeconfig: paths in it are relative to this folder."""

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return get_str(self.cluster, "server")


def read_kubeconfig(paths: str = "", context: str = "") -> Kubeconfig:
    """Return the server and the user of a context. Raises FailedPrecondition.

    Args:
        paths: Paths joined by ":", as kubectl takes them: the first that exists is used. "": in a pod its service
            account, else KUBECONFIG, else ~/.kube/config.
        context: "" for the current context.
    """
    try:
        if not paths and (_POD_FOLDER / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            config = _service_account()
        else:
            path = _first_existing(paths or os.environ.get("KUBECONFIG") or _DEFAULT_PATH)
            config = _read_context(path, context)
    except FailedPrecondition:
        raise
    except Exception as error:
        # Invalid YAML, an unknown context, a cluster that is not defined.
        log.info("the kubeconfig cannot be used: %s: %s", type(error).__name__, error)
        which = f"the context {context!a}" if context else "a current context"
        raise FailedPrecondition(
            f"the kubeconfig cannot be used: check that it is valid and has {which} (`kubectl config get-contexts`)"
        ) from None
    if not config.server:
        raise FailedPrecondition("the kubeconfig names no server: choose one with `kubectl config use-context`")
    return config


def import_httpx2() -> Any:
    """Import httpx2. Raises MissingExtra."""
    try:
        import httpx2
    except ImportError:
        raise MissingExtra("access to Kubernetes", "kubernetes") from None
    return httpx2


def open_client(config: Kubeconfig, seconds: float) -> AsyncClient:
    """Open an HTTP client for the server of a kubeconfig; `seconds` is the timeout of a call. Raises FailedPrecondition."""
    httpx2 = import_httpx2()
    try:
        token = get_str(config.user, "token")
        client: AsyncClient = httpx2.AsyncClient(
            base_url=config.server,
            verify=_ssl_context(config),
            auth=_auth(config),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=seconds,
        )
    except Exception as error:
        # Missing or invalid certificate files, an invalid URL, an unsupported login method: there are many exceptions.
        log.error("the kubeconfig's user or certificates cannot be used", exc_info=error)
        raise FailedPrecondition(
            "the kubeconfig's user or certificates cannot be used; try `kubectl get pods` (the log has more)"
        ) from None
    return client


def _service_account() -> Kubeconfig:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Kubeconfig(
        {"server": f"https://{f'[{host}]' if ':' in host else host}:{port}", "certificate-authority": "ca.crt"},
        {"tokenFile": "token"},
        (_POD_FOLDER / "namespace").read_text(encoding="utf-8").strip(),
        _POD_FOLDER,
    )


def _read_context(path: Path, context: str) -> Kubeconfig:
    document = load_yaml(path.read_text(encoding="utf-8"))
    chosen = _entry(document, "context", context or document["current-context"])
    user = get_str(chosen, "user")
    return Kubeconfig(
        _entry(document, "cluster", chosen["cluster"]),
        _entry(document, "user", user) if user else EMPTY,
        get_str(chosen, "namespace") or "default",
        path.parent,
    )


def _entry(document: Any, kind: str, name: str) -> Document:
    """Return the content of an entry in one of the lists `clusters`, `contexts` and `users`. Raises KeyError."""
    return {entry["name"]: get_mapping(entry, kind) for entry in document[f"{kind}s"]}[name]


def _first_existing(paths: str) -> Path:
    candidates = [Path(path).expanduser() for path in paths.split(os.pathsep) if path]
    for path in candidates:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in candidates)
    raise FailedPrecondition(
        f"there is no kubeconfig at {tried}: set KUBECONFIG, or create one with your cluster's tool"
    )


def _ssl_context(config: Kubeconfig) -> ssl.SSLContext:
    import httpx2

    authority = get_str(config.cluster, "certificate-authority")
    authority_data = get_str(config.cluster, "certificate-authority-data")
    if authority_data:
        context = ssl.create_default_context(cadata=base64.b64decode(authority_data).decode())
    elif authority:
        context = ssl.create_default_context(cafile=config.folder / authority)
    else:
        context = httpx2.create_ssl_context(verify=config.cluster.get("insecure-skip-tls-verify") is not True)
    certificate = _read_pem(config, "client-certificate")
    if certificate:
        # OpenSSL reads them from a file only.
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + _read_pem(config, "client-key"))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _read_pem(config: Kubeconfig, name: str) -> bytes:
    path, data = get_str(config.user, name), get_str(config.user, f"{name}-data")
    if data:
        return base64.b64decode(data)
    return (config.folder / path).read_bytes() if path else b""


def _auth(config: Kubeconfig) -> Auth | tuple[str, str] | None:
    """Return the login of a user without a fixed token; None for one with a token or a certificate alone."""
    user = config.user
    path = get_str(user, "tokenFile")
    if path:

        async def read_token() -> str:
            try:
                return (config.folder / path).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise _login_error(f"{path}: {type(error).__name__}") from None

        return _renewed_token(read_token)
    if get_str(user, "token"):
        return None
    if "exec" in user:
        return _renewed_token(lambda: _run_plugin(get_mapping(user, "exec")))
    if get_str(user, "username"):
        return get_str(user, "username"), get_str(user, "password")
    if "auth-provider" in user:
        raise ValueError("auth-provider is not supported; use a plugin (`exec`)")
    return None


def _renewed_token(get_token: Callable[[], Awaitable[str]]) -> Auth:
    """Return a login with a token that expires: after a 401, it is fetched again."""
    import httpx2

    class RenewedToken(httpx2.Auth):
        token = ""

        async def async_auth_flow(self, request: Request) -> AsyncGenerator[Request, Response]:
            is_new = not self.token
            if is_new:
                self.token = await get_token()
            request.headers["Authorization"] = f"Bearer {self.token}"
            response = yield request
            if response.status_code == 401 and not is_new:
                self.token = await get_token()
                request.headers["Authorization"] = f"Bearer {self.token}"
                yield request

    return RenewedToken()


async def _run_plugin(plugin: Document) -> str:
    """Run a credential plugin of kubectl; return the token that it prints."""
    command = [get_str(plugin, "command"), *map(str, get_list(plugin, "args"))]
    info = {"apiVersion": get_str(plugin, "apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    environment = {get_str(entry, "name"): get_str(entry, "value") for entry in get_list(plugin, "env")}
    try:
        completed = await run_command(command, environment={"KUBERNETES_EXEC_INFO": json.dumps(info), **environment})
    except HeadraceError as error:
        raise _login_error(error.message) from None
    try:
        token = get_str(json.loads(completed.out), "status", "token") if not completed.code else ""
    except (ValueError, RecursionError):
        token = ""
    if not token:
        raise _login_error(f"{command[0]} ended with code {completed.code} and printed no token: {completed.err}")
    return token


def _login_error(detail: str) -> FailedPrecondition:
    log.error("the login method of the kubeconfig does not work: %s", detail)
    return FailedPrecondition("the login method of the kubeconfig does not work (the log has more)")
