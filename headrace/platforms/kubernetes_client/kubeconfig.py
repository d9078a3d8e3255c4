# SPDX-License-Identifier: Apache-2.0
"""Find and read the kubeconfig: the one given, a pod's service account, or the user's own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import FailedPrecondition

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from lightkube import SingleConfig

log = logging.getLogger("headrace.launch")

_POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_DEFAULT_PATH = "~/.kube/config"


def read_kubeconfig(given: str = "", context: str = "") -> SingleConfig:
    """Return the server and the user of a context. Raises FailedPrecondition.

    Args:
        given: Paths joined by ":", as kubectl takes them: the first that exists is used. "": in a pod its service
            account, else KUBECONFIG, else ~/.kube/config.
        context: "" for the current context.
    """
    try:
        from lightkube import KubeConfig
    except ImportError:
        raise FailedPrecondition("services on Kubernetes need lightkube: pip install 'headrace[kubernetes]'") from None
    try:
        if not given and _POD_TOKEN.exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            contexts = KubeConfig.from_service_account()
        else:
            contexts = KubeConfig.from_file(_first_existing(given or os.environ.get("KUBECONFIG") or _DEFAULT_PATH))
        config = contexts.get(context or None)
    except FailedPrecondition:
        raise
    except Exception as error:
        # Invalid YAML, an unknown context, a cluster that is not defined.
        log.info("the kubeconfig cannot be used: %s: %s", type(error).__name__, error)
        which = f"the context {context!a}" if context else "a current context"
        raise FailedPrecondition(
            f"the kubeconfig cannot be used: check that it is valid and has {which} (`kubectl config get-contexts`)"
        ) from None
    if config is None or not config.cluster.server:
        raise FailedPrecondition("the kubeconfig names no server: choose one with `kubectl config use-context`")
    return config


def open_client(config: SingleConfig, seconds: float) -> AsyncClient:
    """Open an HTTP client for the server of a kubeconfig; `seconds` is the timeout of a call. Raises FailedPrecondition."""
    import httpx2
    from lightkube.config import client_adapter

    try:
        return client_adapter.AsyncClient(config, client_adapter.ConnectionParams(timeout=httpx2.Timeout(seconds)))
    except Exception as error:
        raise login_error(error) from None


def login_error(error: Exception) -> FailedPrecondition:
    """Log and describe the failure to open a connection with the user or certificates of a kubeconfig."""
    # Missing or invalid certificate files, a user without a name: lightkube has an exception for each.
    log.error("the kubeconfig's user or certificates cannot be used", exc_info=error)
    return FailedPrecondition(
        "the kubeconfig's user or certificates cannot be used; try `kubectl get pods` (the log has more)"
    )


def _first_existing(paths: str) -> Path:
    candidates = [Path(path).expanduser() for path in paths.split(os.pathsep) if path]
    for path in candidates:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in candidates)
    raise FailedPrecondition(
        f"there is no kubeconfig at {tried}: set KUBECONFIG, or create one with your cluster's tool"
    )
