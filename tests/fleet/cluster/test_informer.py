# SPDX-License-Identifier: Apache-2.0
"""What is known of a kind, as lists, watches and our own writes come in in any order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace.fleet.cluster.resources import CHILDREN
from headrace.platforms.kubernetes_client.api import ApiError
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import ServedResource

CONFIG_MAPS = ServedResource(CHILDREN[1], "v1")


def thing(version: int, name: str = "a", uid: str = "u", owner: str = "") -> dict[str, Any]:
    owners = [{"kind": "InferenceService", "name": owner}] if owner else []
    noted = [{"manager": "kubectl"}, {"manager": "headrace-operator"}]
    metadata = {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "ownerReferences": owners, "managedFields": noted}}


class Scripted:
    """In place of an API server: each list, and each watch, as the test says."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.over = asyncio.Event()

    async def list(self, where: ServedResource, selector: str = "") -> tuple[list[Any], str]:
        return self.lists.pop(0), "10"

    async def watch(self, where: ServedResource, version: str, selector: str = "") -> AsyncIterator[tuple[str, Any]]:
        self.asked.append(version)
        if not self.watches:
            self.over.set()
            await asyncio.Event().wait()
        for each in self.watches.pop(0):
            if isinstance(each, Exception):
                raise each
            yield each


def followed(lists: list[Any], watches: list[Any], then: Any = None) -> tuple[Informer, list[Any], list[str]]:
    told: list[Any] = []

    async def run() -> tuple[Informer, list[Any], list[str]]:
        api = Scripted(lists, watches)

        def changed(before: Any, after: Any) -> None:
            told.append(tuple(each and each["metadata"]["resourceVersion"] for each in (before, after)))

        def owner(document: Any) -> list[tuple[str, str]]:
            return [("n", each["name"]) for each in document["metadata"]["ownerReferences"]]

        follower = Informer(api, CONFIG_MAPS, changed, index_by=owner)  # type: ignore[arg-type]
        task = asyncio.create_task(follower.run())
        await asyncio.wait_for(api.over.wait(), 60)
        if then is not None:
            then(follower)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return follower, told, api.asked

    return asyncio.run(run())


def test_changes_come_in_and_others_notes_are_left_out() -> None:
    events = [("MODIFIED", thing(11)), ("BOOKMARK", thing(15)), ("DELETED", thing(16)), ApiError(410, "Expired", "")]
    follower, told, asked = followed([[thing(5)], []], [events])
    assert told == [(None, "5"), ("5", "11"), ("11", None)]
    assert follower.all() == [] and asked == ["10", "10"]


def test_an_older_version_is_ignored() -> None:
    follower, told, _ = followed(
        [[thing(5)]], [], lambda each: [each.put(thing(9)), each.put(thing(7)), each.put(thing(9))]
    )
    assert told == [(None, "5"), ("5", "9")]
    (kept,) = follower.all()
    assert kept["metadata"]["managedFields"] == [{"manager": "headrace-operator"}]


def test_a_write_reported_after_the_objects_deletion_does_not_restore_it() -> None:
    events = [("DELETED", thing(12)), ApiError(410, "Expired", "")]
    follower, _, _ = followed([[thing(5)], []], [events], lambda each: each.put(thing(11)))
    assert follower.all() == []


def test_an_old_end_does_not_touch_a_new_life() -> None:
    events = [("MODIFIED", thing(20, uid="new")), ("DELETED", thing(12)), ApiError(410, "Expired", "")]
    follower, _, _ = followed([[thing(5)], [thing(20, uid="new")]], [events])
    assert [each["metadata"]["uid"] for each in follower.all()] == ["new"]


def test_objects_missing_in_a_new_list_are_removed_and_owners_are_kept_right() -> None:
    first = [thing(5, "a", "ua", "x"), thing(6, "b", "ub", "x")]
    events = [("MODIFIED", thing(11, "a", "ua", "y")), ApiError(410, "Expired", "")]
    follower, told, _ = followed([first, [thing(11, "a", "ua", "y")]], [events])
    assert follower.indexed(("n", "x")) == []
    assert [each["metadata"]["name"] for each in follower.indexed(("n", "y"))] == ["a"]
    assert told[-1] == ("6", None)
