# SPDX-License-Identifier: Apache-2.0
"""The certificates in their Secret, which all replicas share. Called by `running`, about once a minute.

Whichever replica comes first fills the Secret; the one that leads renews what is in it. Writes name the version that was
read, so that of two replicas one is told to look again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from headrace.fleet.cluster.api import Api, Refused
from headrace.fleet.cluster.webhooks.certificates import Certificates, kept_in, made, renewed
from headrace.fleet.cluster.webhooks.settings import SECRET, SECRETS, WebhookSettings
from headrace.fleet.words import Document

log = logging.getLogger("headrace.operator")

_TRIES = 5


class Keeper:
    """Reads the Secret, and fills it."""

    def __init__(self, api: Api, settings: WebhookSettings, now: Callable[[], datetime]) -> None:
        self._api = api
        self._settings = settings
        self._now = now

    async def look(self, *, leads: bool, known: str) -> Certificates:
        """What is to be served now. Raises Refused or Unreachable.

        known: the authorities that the API server has had the time to hear of.
        """
        for _ in range(_TRIES):
            secret = await self._api.get(SECRETS, self._settings.namespace, SECRET)
            kept = kept_in(secret) if secret is not None else None
            wanted = self._wanted(kept, leads=leads, known=known)
            if wanted is kept:
                return wanted
            try:
                await self._write(secret, wanted)
            except Refused as refused:
                if refused.code != 409:  # another was quicker
                    raise
                continue
            log.info("the webhooks' certificates in the Secret %s/%s are new", self._settings.namespace, SECRET)
            return wanted
        raise Refused(409, "Conflict", f"the Secret {SECRET} is written by others all the time")

    def _wanted(self, kept: Certificates | None, *, leads: bool, known: str) -> Certificates:
        settings, now = self._settings, self._now()
        if kept is None:
            return made(settings.names, now, settings.lifetimes)
        if not leads:
            return kept
        return renewed(kept, settings.names, now, settings.lifetimes, known=known == kept.authorities)

    async def _write(self, secret: Document | None, wanted: Certificates) -> None:
        body: dict[str, object] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET},
            "type": "Opaque",
            **(secret or {}),
            "data": wanted.data(),
        }
        if secret is None:
            try:
                await self._api.create(SECRETS, self._settings.namespace, body)
            except Refused as refused:
                if refused.code == 403:
                    log.error(
                        "there is no Secret %s/%s and no right to make it: apply the operator's manifests again",
                        self._settings.namespace,
                        SECRET,
                    )
                raise
        else:
            await self._api.replace(SECRETS, self._settings.namespace, SECRET, body)
