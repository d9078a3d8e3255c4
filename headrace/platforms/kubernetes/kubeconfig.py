# SPDX-License-Identifier: Apache-2.0
"""Which cluster is meant: the kubeconfig that was given, a pod's own account, or this machine's.

Called by `cluster`, by the operator and its verbs (`fleet.cluster.api`), and by the router where it asks a cluster.
"""

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

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_HOME = "~/.kube/config"


def read_kubeconfig(given: str = "", context: str = "") -> SingleConfig:
    """The server and the user of a context. Raises FailedPrecondition that says what to do.

    Args:
        given: Paths joined by ":", as kubectl takes them: the first that exists counts. "": in a pod its account, else
            KUBECONFIG, else ~/.kube/config.
        context: "" for the current one.
    """
    try:
        from lightkube import KubeConfig
    except ImportError:
        raise FailedPrecondition("services on Kubernetes need lightkube: pip install 'headrace[kubernetes]'") from None
    try:
        if not given and _IN_POD.exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            found = KubeConfig.from_service_account()
        else:
            found = KubeConfig.from_file(_path(given or os.environ.get("KUBECONFIG") or _HOME))
        config = found.get(context or None)
    except FailedPrecondition:
        raise
    except Exception as error:
        # YAML that is none, a context that is not there, a cluster that is not named.
        log.info("the kubeconfig cannot be used: %s: %s", type(error).__name__, error)
        which = f"the context {context!a}" if context else "its current context"
        raise FailedPrecondition(
            f"the kubeconfig cannot be used: look whether it is one, and has {which} (`kubectl config get-contexts`)"
        ) from None
    if config is None or not config.cluster.server:
        raise FailedPrecondition("the kubeconfig names no server: choose one with `kubectl config use-context`")
    return config


def open_client(config: SingleConfig, seconds: float) -> AsyncClient:
    """A client of the one server that a kubeconfig names, with `seconds` for a call. Raises FailedPrecondition."""
    import httpx2
    from lightkube.config import client_adapter

    try:
        return client_adapter.AsyncClient(config, client_adapter.ConnectionParams(timeout=httpx2.Timeout(seconds)))
    except Exception as error:
        raise unusable(error) from None


def unusable(error: Exception) -> FailedPrecondition:
    """What to say of a user or certificates that no connection can be made with."""
    # Certificates that are no files or no certificates, a user without a name: lightkube tells them all apart.
    log.error("the kubeconfig's user or certificates cannot be used", exc_info=error)
    return FailedPrecondition(
        "the kubeconfig's user or certificates cannot be used; try `kubectl get pods` (the log has more)"
    )


def _path(given: str) -> Path:
    candidates = [Path(each).expanduser() for each in given.split(os.pathsep) if each]
    for path in candidates:
        if path.is_file():
            return path
    told = ", ".join(str(path) for path in candidates)
    raise FailedPrecondition(
        f"there is no kubeconfig at {told}: set KUBECONFIG, or have one made by your cluster's tool"
    )
