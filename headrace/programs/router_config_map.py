# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap that a router's configuration file is mounted from, watched through the API server.

`programs.router` imports this module only with `--config-map`. The kubelet renews a mounted file up to a minute late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from headrace.core.errors import HeadraceError
from headrace.fleet.router.scale_targets import RETRY_SECONDS
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import CONFIG_MAPS, get_str

log = logging.getLogger("headrace.router")

_CALL_SECONDS = 10.0
_WATCH_SECONDS = 60


class WatchedConfigMap:
    """One key of a ConfigMap. Needs `get`, `list` and `watch` of it by name."""

    def __init__(self, api: ApiClient, namespace: str, name: str, key: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._key = key

    async def contents(self) -> AsyncIterator[str]:
        """Yield the content and every change of it. Failures are logged and retried."""
        content, pause, failure = "", RETRY_SECONDS[0], ""
        while True:
            try:
                async with aclosing(self._until_the_watch_ends()) as contents:
                    async for text in contents:
                        pause, failure = RETRY_SECONDS[0], ""
                        if text and text != content:
                            content = text
                            yield text
            except (ApiError, Unreachable, HeadraceError) as error:
                if str(error) != failure:
                    failure = str(error)
                    log.warning(
                        "Cannot watch ConfigMap %s/%s, the settings stay: %s", self._namespace, self._name, error
                    )
                pause = min(2 * pause, RETRY_SECONDS[1])
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the client."""
        await self._api.close()

    async def _until_the_watch_ends(self) -> AsyncGenerator[str]:
        # A Role for one name allows list and watch only with this selector.
        selector = f"metadata.name={self._name}"
        items, version = await self._api.list(CONFIG_MAPS, "", self._namespace, selector)
        for config_map in items:
            yield get_str(config_map, "data", self._key)
        watch = self._api.watch(CONFIG_MAPS, version, "", self._namespace, selector, seconds=_WATCH_SECONDS)
        async with aclosing(watch) as events:  # type: ignore[type-var]
            async for change, config_map in events:
                if change in ("ADDED", "MODIFIED"):
                    yield get_str(config_map, "data", self._key)


def connect_config_map(namespace: str, name: str, key: str) -> WatchedConfigMap:
    """Return a ConfigMap of the cluster that we run in. Raises FailedPrecondition."""
    return WatchedConfigMap(connect("", timeout=_CALL_SECONDS), namespace, name, key)
