# SPDX-License-Identifier: Apache-2.0
"""The workers of a replica that is a group: servers in other bundles of its placement group, each started by an actor.

    workers = await launch_workers(spec, member, leader_ports)   # in the leader's replica
    await workers.ended()                                        # waits until one ends by itself; returns how
    await workers.stop()

Ray ends the actors with the replica that created them, even after SIGKILL, and the kernel ends a server with its actor. So
the whole group ends together, and Ray Serve starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.fleet.ray_serve.replica_spec import GroupMember, ReplicaSpec, actor_options, parse_spec
from headrace.fleet.ray_serve.server_process import ServerProcess, start_server

log = logging.getLogger("headrace.ray")

STOP_SECONDS = 10.0
"""For a server without open requests to end, after SIGTERM."""
_ACTOR_STOP_SECONDS = STOP_SECONDS + 5.0


class Workers(Protocol):
    """The workers of a group, as its leader sees them."""

    async def ended(self) -> str:
        """Wait until a worker has ended by itself; return which, and how."""

    async def stop(self) -> None:
        """Stop all."""


LaunchWorkers = Callable[[ReplicaSpec, GroupMember, Mapping[int, int]], Awaitable[Workers]]


class WorkerServer:
    """A worker: the class of its actor. Its methods return texts and not errors, which Ray would pickle."""

    def __init__(self, launch: Callable[..., Awaitable[ServerProcess]] = start_server) -> None:
        self._launch = launch
        self._server: ServerProcess | None = None

    async def start(self, content: Mapping[str, Any], member: Mapping[str, Any]) -> str:
        """Start the server; return why it cannot start, or "". content: a `ReplicaSpec` as JSON, member: a `GroupMember`."""
        try:
            spec = parse_spec(content).of_worker()
            self._server = await self._launch(spec, GroupMember.from_json(member))
        except HeadraceError as error:
            return error.message
        return ""

    async def ended(self) -> str:
        """Wait until the server has ended; return how."""
        if self._server is None:
            return f"the worker on {socket.gethostname()} has no server"
        return self._server.end_message(await self._server.wait())

    async def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)


class RayWorkers:
    """Implements `Workers` with an actor for each."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    async def ended(self) -> str:
        """See `Workers`."""
        tasks = [asyncio.ensure_future(_end_of(actor, index)) for index, actor in enumerate(self._actors, 1)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """See `Workers`: actors that do not answer are killed too."""
        import ray

        stopping = [asyncio.ensure_future(_answer(actor.stop.remote())) for actor in self._actors]
        await asyncio.wait(stopping, timeout=_ACTOR_STOP_SECONDS)
        for task, actor in zip(stopping, self._actors, strict=True):
            task.cancel()
            ray.kill(actor)
        await asyncio.gather(*stopping, return_exceptions=True)


async def launch_workers(spec: ReplicaSpec, member: GroupMember, leader_ports: Mapping[int, int]) -> Workers:
    """Start the workers of this replica in the other bundles of its placement group.

    Raises FailedPrecondition with the reason of the first that cannot start. `member`: the place of the leader.
    """
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if spec.worker is None:
        raise FailedPrecondition(f"{spec.name} has no workers")
    group = get_current_placement_group()
    actors = []
    for index in range(1, member.size):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        kind = ray.remote(WorkerServer).options(scheduling_strategy=place, **actor_options(spec.worker))
        actors.append(kind.remote())
    workers = RayWorkers(actors)
    content = spec.as_json()
    try:
        started = [
            actor.start.remote(content, member.worker(index, leader_ports).as_json())
            for index, actor in enumerate(actors, 1)
        ]
        for index, reason in enumerate(await asyncio.gather(*map(_answer, started)), 1):
            if reason:
                raise FailedPrecondition(f"worker {index} of {spec.name}: {reason}")
    except BaseException:
        with contextlib.suppress(Exception):
            await workers.stop()
        raise
    return workers


async def _end_of(actor: Any, index: int) -> str:
    return f"worker {index}: {await _answer(actor.ended.remote())}"


async def _answer(reference: Any) -> str:
    """Return what an actor answers; if it has ended, that."""
    import ray

    try:
        return str(await reference or "")
    except ray.exceptions.RayError as error:
        log.debug("a worker did not answer", exc_info=error)
        return "its process or its node has ended"


def leader_address() -> str:
    """Return the address of this node, as the other nodes of the Ray cluster reach it."""
    import ray

    return str(ray.util.get_node_ip_address())
