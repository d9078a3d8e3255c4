# SPDX-License-Identifier: Apache-2.0
"""Calls to the API server in one namespace, with the errors of the launcher. The driver uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.kubernetes.manifests import FIELD_MANAGER
from headrace.platforms.kubernetes.settings import KubernetesSettings
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, InvalidAnswer, Unreachable, connect
from headrace.platforms.kubernetes_client.kubeconfig import read_kubeconfig
from headrace.platforms.kubernetes_client.objects import Document, Resource, ServedResource, get_mapping

log = logging.getLogger("headrace.launch")


def _served(group: str, kind: str, *, namespaced: bool = True) -> ServedResource:
    return ServedResource(Resource(group, ("v1",), kind, f"{kind.lower()}s", namespaced), "v1")


_ACCESS_REVIEWS = _served("authorization.k8s.io", "SelfSubjectAccessReview", namespaced=False)
_KINDS = {
    served.resource.kind: served
    for served in (
        _served("batch", "Job"),
        _served("apps", "StatefulSet"),
        _served("", "Pod"),
        _served("", "Service"),
        _served("", "Secret"),
        _served("", "Event"),
        _served("", "Node", namespaced=False),
        _served("", "Namespace", namespaced=False),
    )
}


async def gather_all(*calls: Awaitable[Any]) -> list[Any]:
    """Await all calls; if one fails, wait for the others before raising, so that none continues in the background."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)


def refusal_code(error: HeadraceError) -> int:
    """Return the status code with which the API server refused a call of ClusterClient; 0 if it was not a refusal."""
    return error.__cause__.code if isinstance(error.__cause__, ApiError) else 0


class ClusterClient:
    """One namespace of one cluster. A connection belongs to the event loop that opened it."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._namespace = settings.namespace
        self._server = ""
        self._api: ApiClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def server(self) -> str:
        """The URL of the API server. Raises FailedPrecondition without a kubeconfig."""
        if not self._server:
            self._server = read_kubeconfig(self._settings.kubeconfig, self._settings.context).server
        return self._server

    async def apply(self, document: Document) -> Document:
        """Apply an object server-side; return the result."""
        with self._call(f"creating the {document['kind']} {document['metadata']['name']}") as api:
            return await api.apply(_KINDS[document["kind"]], document)

    async def get(self, kind: str, name: str) -> Document | None:
        """Return an object by name; None if there is none."""
        with self._call(f"reading the {kind} {name}") as api:
            return await api.get(_KINDS[kind], self._namespace, name)

    async def list(self, kind: str, labels: Mapping[str, str | None] = {}, uid: str = "") -> list[Document]:
        """Return all objects with these labels (None: any value), or the Events of an object."""
        selector = ",".join(name if value is None else f"{name}={value}" for name, value in labels.items())
        fields = f"involvedObject.uid={uid}" if uid else ""
        with self._call(f"listing {kind}s") as api:
            return (await api.list(_KINDS[kind], selector, self._namespace, fields))[0]

    async def delete(self, kind: str, name: str, *, grace: int | None = None, foreground: bool = False) -> None:
        """Delete an object. Succeeds if there is none."""
        propagation = "Foreground" if foreground else "Background"
        with self._call(f"removing the {kind} {name}") as api:
            await api.delete(_KINDS[kind], self._namespace, name, grace_seconds=grace, propagation=propagation)

    async def log(self, pod: str, container: str, tail: int) -> str:
        """Return the last lines of a container's log."""
        with self._call(f"reading the log of the pod {pod}") as api:
            return await api.log(self._namespace, pod, container, tail)

    async def allowed(self, verb: str, group: str, resource: str) -> bool:
        """Whether the user has a permission in this namespace."""
        attributes = {"group": group, "resource": resource, "verb": verb, "namespace": self._namespace}
        with self._call("checking permissions") as api:
            review = await api.create(_ACCESS_REVIEWS, "", {"spec": {"resourceAttributes": attributes}})
            return get_mapping(review, "status").get("allowed") is True

    async def close(self) -> None:
        """Close the connections."""
        api, self._api = self._api, None
        if api is not None and self._loop is asyncio.get_running_loop():
            await api.close()

    @contextlib.contextmanager
    def _call(self, doing: str) -> Iterator[ApiClient]:
        """Yield the client for a call. Raises the error for a call that fails; a refusal is its cause."""
        loop = asyncio.get_running_loop()
        if self._api is None or self._loop is not loop:
            settings = self._settings
            self._api = connect(
                settings.kubeconfig, settings.context, settings.request_seconds, field_manager=FIELD_MANAGER
            )
            self._loop = loop
        doing = f"{doing} in namespace {self._namespace}"
        try:
            yield self._api
        except ApiError as error:
            raise refusal_error(error.code, error.reason, error.message, doing) from error
        except InvalidAnswer:
            log.exception("%s", doing)
            raise Unavailable(f"{doing}: {self.server} does not answer like an API server; is it one?") from None
        except Unreachable as error:
            log.info("%s: %s: %s", doing, error, error.__cause__)
            raise unreachable_error(self.server, doing, str(error)) from None
        except FailedPrecondition as error:  # the login method
            raise FailedPrecondition(f"{doing}: {error.message}") from None


_MAX_DETAIL = 500


def refusal_error(code: int, reason: str, message: str, doing: str) -> HeadraceError:
    """Return the error for a refused request. `doing`: "creating the Job x in namespace y"."""
    detail = " ".join(message.split())[:_MAX_DETAIL]
    if code == 401:
        return FailedPrecondition(f"{doing}: the cluster does not accept the credentials; log in again ({detail})")
    if code == 403 or reason == "Forbidden":
        return _forbidden_error(detail, doing)
    if code == 404 and "namespaces" in detail:
        return FailedPrecondition(f"{doing}: there is no such namespace; create it, or name another ({detail})")
    if code == 404:
        return FailedPrecondition(f"{doing}: the cluster does not have it ({detail})")
    if code == 409:
        return Unavailable(f"{doing}: it was changed at the same time; try again ({detail})")
    if code == 413:
        return InvalidArgument(f"{doing}: it is larger than the cluster accepts; shorten its variables ({detail})")
    if code == 429:
        return Unavailable(f"{doing}: the API server is overloaded; try again later ({detail})")
    if _is_admission(detail):
        return _admission_error(detail, doing)
    if 400 <= code < 500:
        return InvalidArgument(f"{doing}: the cluster rejects it: {detail}")
    return Unavailable(f"{doing}: the API server failed; try again later ({detail})")


def _forbidden_error(detail: str, doing: str) -> HeadraceError:
    if "exceeded quota" in detail:
        return ResourceExhausted(
            f"{doing}: the namespace's quota is used up; stop a service, or have the quota raised ({detail})"
        )
    if _is_admission(detail) or ("forbidden: " in detail and " cannot " not in detail):
        return _admission_error(detail, doing)
    return FailedPrecondition(
        f"{doing}: the cluster does not allow it ({detail}); get the role in the guide kubernetes-services.md"
    )


def _admission_error(detail: str, doing: str) -> HeadraceError:
    return FailedPrecondition(
        f"{doing}: a policy of the cluster refuses it ({detail}); change the settings named there, or ask for an exception"
    )


def _is_admission(detail: str) -> bool:
    return "admission webhook" in detail or "violates PodSecurity" in detail or "ValidatingAdmissionPolicy" in detail


def unreachable_error(server: str, doing: str, kind: str) -> HeadraceError:
    """Return the error if there is no answer. `kind`: the class of the exception; its text may contain secrets."""
    return Unavailable(
        f"{doing}: the API server {server} does not answer ({kind}); is it the right one, and can it be reached?"
    )
