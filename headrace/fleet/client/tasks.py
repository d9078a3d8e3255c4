# SPDX-License-Identifier: Apache-2.0
"""Calls to a fleet that run at once, and generators that end with who reads them: nothing goes on unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar, cast

T = TypeVar("T")


async def together(*calls: Awaitable[T]) -> list[T]:
    """All at once. Where one fails the others are waited for: none may go on when the connections are let go."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return [each for each in done if not isinstance(each, BaseException)]


def closing(items: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """`async with` it, and what was opened for the items is closed with the reader, not some time later."""
    return aclosing(cast("AsyncGenerator[T, None]", items))
