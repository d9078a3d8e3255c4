# SPDX-License-Identifier: Apache-2.0
"""A server for each file of tests, raw clients to it, and a look at it after each test: it must still serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from adversary import Client
from worlds import World, no_failures, world_of

from headrace.core.limits import Limits


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    with world_of() as world:
        yield world


@pytest.fixture
def world(shared_world: World) -> Iterator[World]:
    """The file's server. When the test is over, it still serves, and nothing it did not expect has happened."""
    with no_failures():
        yield shared_world
        shared_world.disconnect()
        shared_world.check_alive()
        shared_world.disconnect()


@pytest.fixture
def client(world: World) -> Client:
    """A connection after the handshake."""
    return world.connect()


@pytest.fixture
def limited() -> Iterator[Callable[..., World]]:
    """Servers with limits of their own, for this test."""
    with no_failures(), ExitStack() as stack:
        worlds: list[World] = []

        def make(**limits: float) -> World:
            worlds.append(stack.enter_context(world_of(Limits(**limits))))  # type: ignore[arg-type]
            return worlds[-1]

        yield make
        for world in worlds:
            world.disconnect()
            world.check_alive()
