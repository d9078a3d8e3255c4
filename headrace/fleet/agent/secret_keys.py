# SPDX-License-Identifier: Apache-2.0
"""The Secret that a model names for its download. Called by `agent`; no Secret is read that no model names."""

from __future__ import annotations

import logging

from headrace.core.errors import FailedPrecondition, PermissionDenied, Unavailable
from headrace.fleet.agent.marks import SECRETS
from headrace.fleet.agent.sources import Source, credentials_of
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.words import Document, text
from headrace.models.storage.credentials import CloudCredentials

log = logging.getLogger("headrace.agent")

SECRETS_ROLE = "headrace-model-agent-secrets"
"""The ClusterRole that an administrator binds in namespaces whose Secrets the agent may read."""


async def credentials_for(api: Api, model: Document, source: Source, own: str) -> CloudCredentials | None:
    """The keys for a download: of a Secret in the model's namespace, or in `own` for a ClusterBaseModel.

    Raises HeadraceError with what to do.
    """
    if not source.key:
        return credentials_of(source, None)
    namespace = text(model, "metadata", "namespace") or own
    where = f"the Secret {source.key} of namespace {namespace}, which spec.storage.key names,"
    try:
        secret = await api.get(SECRETS, namespace, source.key)
    except Unreachable:
        raise Unavailable(f"{where} could not be read: the API server does not answer") from None
    except Refused as refused:
        log.warning("%s cannot be read: %s", where, refused)
        if refused.code == 403:
            also = f", or install it with --agent-secret {source.key}" if namespace == own else ""
            raise PermissionDenied(
                f"{where} may not be read by the agent; bind the ClusterRole {SECRETS_ROLE} to its service account by a "
                f"RoleBinding in {namespace}{also}"
            ) from None
        raise Unavailable(f"{where} could not be read; the agent's log has more") from None
    if secret is None:
        raise FailedPrecondition(f"{where} is not there; create it")
    return credentials_of(source, secret)
