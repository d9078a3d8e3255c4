# SPDX-License-Identifier: Apache-2.0
"""How many downloads there are at once. Used by `agent`."""

from __future__ import annotations

import asyncio

from headrace.core.errors import Cancelled


class Slots:
    """So many, and who wants one waits, unless there is news meanwhile."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def take(self, news: asyncio.Event) -> None:
        """Return with a slot. Raises Cancelled when there is news first: the download may not be wanted any more."""
        slot, heard = asyncio.ensure_future(self._free.acquire()), asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait([slot, heard], return_when=asyncio.FIRST_COMPLETED)
            if heard.done():
                raise Cancelled("there is news of what was to be downloaded")
        except BaseException:
            if not slot.cancel():
                self._free.release()
            raise
        finally:
            heard.cancel()

    def release(self) -> None:
        """Let another have it."""
        self._free.release()
