# SPDX-License-Identifier: Apache-2.0
"""Calls to an API server through lightkube: plain values go in and come out, and errors are ours. Used by the driver.

lightkube is imported when the first call is made: whoever starts nothing on Kubernetes needs none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.platforms.kubernetes.kubeconfig import read_kubeconfig, unusable
from headrace.platforms.kubernetes.names import MANAGER
from headrace.platforms.kubernetes.refusals import refusal, unreachable
from headrace.platforms.kubernetes.settings import KubernetesSettings

if TYPE_CHECKING:
    from lightkube import AsyncClient, SingleConfig

log = logging.getLogger("headrace.launch")

Thing = dict[str, Any]


class Refused(Exception):
    """The API server said no; the driver looks at the code before it tells anybody."""

    def __init__(self, code: int | None, reason: str, message: str, doing: str) -> None:
        super().__init__(message)
        self.code = code
        self.told = refusal(code, reason, message, doing)


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """All at once; where one fails the others are waited for, so that none goes on behind its caller's back."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for each in answers:
        if isinstance(each, BaseException):
            raise each
    return list(answers)


class Cluster:
    """One namespace of one cluster. A connection belongs to the event loop that it was made in."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._config: SingleConfig | None = None
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def server(self) -> str:
        """Its URL. Raises FailedPrecondition where there is no kubeconfig."""
        return str(self._configuration().cluster.server)

    async def apply(self, thing: Thing) -> Thing:
        """Server-side apply: as it comes back. Raises Refused."""
        name = thing["metadata"]["name"]
        with self._told(f"making the {thing['kind']} {name}"):
            from lightkube.types import PatchType

            made = await self._connected().patch(
                _kind(thing["kind"]),
                name,
                thing,
                namespace=self._settings.namespace,
                patch_type=PatchType.APPLY,
                field_manager=MANAGER,
                force=True,
            )
            return dict(made.to_dict())

    async def get(self, kind: str, name: str) -> Thing | None:
        """One by its name; None if there is none. Raises Refused."""
        try:
            with self._told(f"looking at the {kind} {name}"):
                found = await self._connected().get(_kind(kind), name, namespace=self._settings.namespace)
                return dict(found.to_dict())
        except Refused as refused:
            if refused.code == 404:
                return None
            raise

    async def list(self, kind: str, labels: Mapping[str, str | None] = {}, uid: str = "") -> list[Thing]:
        """All with these labels, whatever the value where that is None; or the Events of an object. Raises Refused."""
        with self._told(f"looking for {kind}s"):
            scope = {} if kind == "Node" else {"namespace": self._settings.namespace}
            fields: Any = {"involvedObject.uid": uid} if uid else None
            found = self._connected().list(
                _kind(kind), labels=dict(labels) or None, fields=fields, chunk_size=500, **scope
            )
            return [dict(each.to_dict()) async for each in found]

    async def delete(self, kind: str, name: str, *, grace: int | None = None, foreground: bool = False) -> None:
        """Ask for its end; nothing to end is success. Raises Refused."""
        try:
            with self._told(f"removing the {kind} {name}"):
                from lightkube.types import CascadeType

                await self._connected().delete(
                    _kind(kind),
                    name,
                    namespace=self._settings.namespace,
                    grace_period=grace,
                    cascade=CascadeType.FOREGROUND if foreground else CascadeType.BACKGROUND,
                )
        except Refused as refused:
            if refused.code != 404:
                raise

    async def log(self, pod: str, container: str, tail: int) -> str:
        """The last lines of a container's log. Raises Refused."""
        with self._told(f"reading the log of the pod {pod}"):
            lines = self._connected().log(
                pod, namespace=self._settings.namespace, container=container, tail_lines=max(tail, 0)
            )
            return "".join([line async for line in lines])

    async def allowed(self, verb: str, group: str, resource: str) -> bool:
        """Whether the user may do that in this namespace."""
        with self._told("asking what is allowed"):
            from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
            from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

            wanted = ResourceAttributes(group=group, resource=resource, verb=verb, namespace=self._settings.namespace)
            review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=wanted))
            answer = await self._connected().create(review)
            return bool(answer.status and answer.status.allowed)

    async def close(self) -> None:
        """Let go of the connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.close()

    def _connected(self) -> AsyncClient:
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
                    field_manager=MANAGER,
                )
            except Exception as error:
                raise unusable(error) from None
            self._loop = loop
        return self._client

    def _configuration(self) -> SingleConfig:
        if self._config is None:
            self._config = read_kubeconfig(self._settings.kubeconfig, self._settings.context)
        return self._config

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
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
            raise Refused(status.code, status.reason or "", status.message or "", doing) from None
        except httpx2.HTTPStatusError as error:
            raise Refused(error.response.status_code, "", error.response.text, doing) from None
        except httpx2.HTTPError as error:
            log.info("%s: %s: %s", doing, type(error).__name__, error)
            raise unreachable(self.server, doing, type(error).__name__) from None
        except msgspec.MsgspecError:
            log.exception("%s", doing)
            raise Unavailable(
                f"{doing}: what {self.server} answers is nothing that an API server would; is it one?"
            ) from None
        except ConfigError:
            log.exception("%s", doing)
            raise FailedPrecondition(
                f"{doing}: the kubeconfig's way to log in does not work (the log has more)"
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
