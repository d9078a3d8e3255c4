# SPDX-License-Identifier: Apache-2.0
"""The revision history of a service: what is recorded, what is shown, and what an undo restores."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.client.rollouts import history_rows, rollback
from headrace.fleet.rollouts.history import MAX_REVISIONS, changes, merge_patch, next_history, read_history

NOON = datetime(2026, 1, 15, 12, tzinfo=UTC)


def service(model: str = "a", **engine: Any) -> dict[str, Any]:
    status = {"components": {"engine": {"traffic": [{"revisionName": "r", "percent": 100, "latestRevision": True}]}}}
    spec = {"model": {"name": model}, "engine": {"minReplicas": 1, **engine}}
    return {"metadata": {"name": "birds", "resourceVersion": "7"}, "spec": spec, "status": status}


def after(*specs: dict[str, Any]) -> dict[str, Any]:
    """A service that had these specs, one after the other."""
    document = service()
    for spec in specs:
        document["spec"] = spec["spec"]
        document["status"]["history"] = next_history(document, NOON)
    return document


def test_each_new_spec_is_a_revision_and_scaling_is_none() -> None:
    result = after(service("a"), service("a", maxReplicas=4, canaryTrafficPercent=10), service("b"))
    assert [(revision.number, revision.spec["model"]) for revision in read_history(result)] == [
        (1, {"name": "a"}),
        (2, {"name": "b"}),
    ]
    assert next_history(result, datetime.now(UTC)) == result["status"]["history"], "the same spec changes nothing"


def test_a_restored_spec_is_the_newest_again() -> None:
    result = after(service("a"), service("b"), service("a"))
    assert [(revision.number, revision.spec["model"]["name"]) for revision in read_history(result)] == [
        (2, "b"),
        (3, "a"),
    ]


def test_the_history_is_bounded() -> None:
    result = after(*(service(f"m{number}") for number in range(30)))
    assert [revision.number for revision in read_history(result)] == list(range(31 - MAX_REVISIONS, 31))
    large = after(*(service(f"m{number}", note="x" * 50_000) for number in range(5)))
    assert [revision.number for revision in read_history(large)] == [4, 5]


def test_invalid_entries_are_left_out() -> None:
    document = service()
    document["status"]["history"] = [{"revision": 1, "spec": "{"}, {"spec": "{}"}, {"revision": 3, "spec": "[]"}, "x"]
    assert read_history(document) == []


def test_an_undo_after_a_promotion_restores_the_spec_before_and_leaves_the_scaling() -> None:
    result = after(service("a", image="one", args=["x"]), service("b", image="two", extra={"k": "v"}))
    result["spec"]["engine"] |= {"minReplicas": 3, "canaryTrafficPercent": 50}
    change = rollback(result)
    assert change["metadata"] == {"resourceVersion": "7"}
    assert change["spec"] == {
        "model": {"name": "a"},
        "engine": {"image": "one", "args": ["x"], "extra": None, "canaryTrafficPercent": 100},
    }
    only = rollback(result, "engine")
    assert "model" not in only["spec"] and only["spec"]["engine"]["image"] == "one"


def test_any_revision_can_be_restored_by_its_number() -> None:
    result = after(service("a"), service("b"), service("c"))
    assert rollback(result)["spec"] == {"model": {"name": "b"}}
    assert rollback(result, to_revision=1)["spec"] == {"model": {"name": "a"}}
    with pytest.raises(FailedPrecondition, match="no other revision 3: there are 1, 2"):
        rollback(result, to_revision=3)
    with pytest.raises(InvalidArgument, match="has no component decoder"):
        rollback(result, "decoder")
    with pytest.raises(FailedPrecondition, match="no earlier revision to return to"):
        rollback(after(service("a")))


def test_a_table_shows_the_changes_of_each_revision() -> None:
    rows = history_rows(after(service("a", image="one"), service("b", image="one"), service("b", image="two")))
    assert [(row.revision, row.model, row.change, row.state) for row in rows] == [
        (1, "a", "", ""),
        (2, "b", "model.name: a -> b", ""),
        (3, "b", "engine.image: one -> two", "rolled out"),
    ]
    assert {row.time for row in rows} == {"2026-01-15T12:00:00Z"}
    many = changes({}, {str(number): number for number in range(5)})
    assert many == "0: none -> 0, 1: none -> 1, 2: none -> 2, and 2 more"
    assert changes({"args": ["-m", "a"]}, {"args": ["-m", "b"]}) == "args[1]: a -> b"
    assert len(changes({"a": "x"}, {"a": "y" * 500})) < 100


def test_a_merge_patch_turns_one_mapping_into_the_other() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": 1, "e": {"f": 1}}
    target = {"a": {"b": 2, "c": [1, 2]}, "e": {"f": 1}, "g": {"h": None}}
    assert merge_patch(before, target) == {"a": {"b": 2, "c": [1, 2]}, "d": None, "g": {"h": None}}
    assert merge_patch(before, copy.deepcopy(before)) == {}
    assert json.dumps(merge_patch({}, before)) == json.dumps(before)
