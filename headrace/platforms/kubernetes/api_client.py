# SPDX-License-Identifier: Apache-2.0
"""Calls to an API server through lightkube: plain values in and out, and our errors. The driver uses it.

lightkube is imported with the first call: users of other platforms do not need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.kubernetes.manifests import FIELD_MANAGER
from headrace.platforms.kubernetes.settings import KubernetesSettings
from headrace.platforms.kubernetes_client.kubeconfig import login_error, read_kubeconfig

if TYPE_CHECKING:
    from lightkube import AsyncClient, SingleConfig

log = logging.getLogger("headrace.launch")

KubeObject = dict[str, Any]


class ApiRefusal(Exception):
    """The API server refused a request; the driver handles some codes and raises `error` for the others."""

    def __init__(self, code: int | None, reason: str, message: str, doing: str) -> None:
        super().__init__(message)
        self.code = code
        self.error = refusal_error(code, reason, message, doing)


async def gather_all(*calls: Awaitable[Any]) -> list[Any]:
    """Await all calls; if one fails, wait for the others before raising, so that none continues in the background."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)


class ClusterClient:
    """One namespace of one cluster. A connection belongs to the event loop that opened it."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._config: SingleConfig | None = None
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def server(self) -> str:
        """The URL of the API server. Raises FailedPrecondition without a kubeconfig."""
        return str(self._configuration().cluster.server)

    async def apply(self, document: KubeObject) -> KubeObject:
        """Apply an object server-side; return the result. Raises ApiRefusal."""
        name = document["metadata"]["name"]
        with self._translate_errors(f"creating the {document['kind']} {name}"):
            from lightkube.types import PatchType

            applied = await self._get_client().patch(
                _kind(document["kind"]),
                name,
                document,
                namespace=self._settings.namespace,
                patch_type=PatchType.APPLY,
                field_manager=FIELD_MANAGER,
                force=True,
            )
            return dict(applied.to_dict())

    async def get(self, kind: str, name: str) -> KubeObject | None:
        """Return an object by name; None if there is none. Raises ApiRefusal."""
        try:
            with self._translate_errors(f"reading the {kind} {name}"):
                document = await self._get_client().get(_kind(kind), name, namespace=self._settings.namespace)
                return dict(document.to_dict())
        except ApiRefusal as refused:
            if refused.code == 404:
                return None
            raise

    async def list(self, kind: str, labels: Mapping[str, str | None] = {}, uid: str = "") -> list[KubeObject]:
        """Return all objects with these labels (None: any value), or the Events of an object. Raises ApiRefusal."""
        with self._translate_errors(f"listing {kind}s"):
            scope = {} if kind == "Node" else {"namespace": self._settings.namespace}
            fields: Any = {"involvedObject.uid": uid} if uid else None
            objects = self._get_client().list(
                _kind(kind), labels=dict(labels) or None, fields=fields, chunk_size=500, **scope
            )
            return [dict(item.to_dict()) async for item in objects]

    async def delete(self, kind: str, name: str, *, grace: int | None = None, foreground: bool = False) -> None:
        """Delete an object. Succeeds if there is none. Raises ApiRefusal."""
        try:
            with self._translate_errors(f"removing the {kind} {name}"):
                from lightkube.types import CascadeType

                await self._get_client().delete(
                    _kind(kind),
                    name,
                    namespace=self._settings.namespace,
                    grace_period=grace,
                    cascade=CascadeType.FOREGROUND if foreground else CascadeType.BACKGROUND,
                )
        except ApiRefusal as refused:
            if refused.code != 404:
                raise

    async def log(self, pod: str, container: str, tail: int) -> str:
        """Return the last lines of a container's log. Raises ApiRefusal."""
        with self._translate_errors(f"reading the log of the pod {pod}"):
            lines = self._get_client().log(
                pod, namespace=self._settings.namespace, container=container, tail_lines=max(tail, 0)
            )
            return "".join([line async for line in lines])

    async def allowed(self, verb: str, group: str, resource: str) -> bool:
        """Whether the user has a permission in this namespace."""
        with self._translate_errors("checking permissions"):
            from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
            from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

            wanted = ResourceAttributes(group=group, resource=resource, verb=verb, namespace=self._settings.namespace)
            review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=wanted))
            answer = await self._get_client().create(review)
            return bool(answer.status and answer.status.allowed)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    def _get_client(self) -> AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            config = self._configuration()
            import httpx2
            from lightkube import AsyncClient

            try:
                self._client = AsyncClient(
                    config,
                    namespace=self._settings.namespace,
                    timeout=httpx2.Timeout(self._settings.request_seconds),
                    field_manager=FIELD_MANAGER,
                )
            except Exception as error:
                raise login_error(error) from None
            self._loop = loop
        return self._client

    def _configuration(self) -> SingleConfig:
        if self._config is None:
            self._config = read_kubeconfig(self._settings.kubeconfig, self._settings.context)
        return self._config

    @contextlib.contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        self._configuration()
        import httpx2
        import msgspec
        from lightkube import ApiError
        from lightkube.core.exceptions import ConfigError

        doing = f"{doing} in namespace {self._settings.namespace}"
        try:
            yield
        except ApiError as error:
            status = error.status
            raise ApiRefusal(status.code, status.reason or "", status.message or "", doing) from None
        except httpx2.HTTPStatusError as error:
            raise ApiRefusal(error.response.status_code, "", error.response.text, doing) from None
        except httpx2.HTTPError as error:
            log.info("%s: %s: %s", doing, type(error).__name__, error)
            raise unreachable_error(self.server, doing, type(error).__name__) from None
        except msgspec.MsgspecError:
            log.exception("%s", doing)
            raise Unavailable(f"{doing}: {self.server} does not answer like an API server; is it one?") from None
        except ConfigError:
            log.exception("%s", doing)
            raise FailedPrecondition(
                f"{doing}: the login method of the kubeconfig does not work (the log has more)"
            ) from None


def _kind(kind: str) -> Any:
    from lightkube.resources import apps_v1, batch_v1, core_v1

    return {
        "Job": batch_v1.Job,
        "StatefulSet": apps_v1.StatefulSet,
        "Pod": core_v1.Pod,
        "Service": core_v1.Service,
        "Secret": core_v1.Secret,
        "Node": core_v1.Node,
        "Event": core_v1.Event,
        "Namespace": core_v1.Namespace,
    }[kind]


_MAX_DETAIL = 500


def refusal_error(code: int | None, reason: str, message: str, doing: str) -> HeadraceError:
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
    if code is not None and 400 <= code < 500:
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
