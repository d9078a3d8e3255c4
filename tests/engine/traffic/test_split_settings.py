# SPDX-License-Identifier: Apache-2.0
"""What a split may say: read from trees, checked, and refused in words that say what to write."""

from __future__ import annotations

from typing import Any

import pytest
from split_planes import SplitPlane, echo, open_split_plane

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound
from headrace.engine.traffic.settings import (
    RollbackRules,
    SplitSettings,
    StickyBy,
    check_split,
    parse_split,
    shares_of,
    split_tree,
)
from headrace.engine.traffic.version_choice import sticky_key_of
from headrace.net.http.heads import RequestHead
from support.async_tests import async_test


def test_a_tree_becomes_a_split_and_back() -> None:
    tree = {
        "weights": {"v1": 0.9, "v2": 0.1},
        "sticky": {"header": "x-user-id", "cookie": "sid"},
        "shadows": {"v3": 0.5},
        "tolerance": 0.001,
        "baseline": "v1",
        "rollback": {"error_rate": 0.05, "p99_ms": 200.0, "least_requests": 10, "window_seconds": 30.0},
    }
    split = parse_split(tree)
    assert split == SplitSettings(
        {"v1": 0.9, "v2": 0.1},
        StickyBy(header="x-user-id", cookie="sid"),
        {"v3": 0.5},
        0.001,
        "v1",
        RollbackRules(0.05, 200.0, 10, 30.0),
    )
    assert split_tree(split) == tree
    # YAML's keys are numbers where they look like it.
    assert parse_split({"weights": {1: 90, 2: 10}, "baseline": 1}) == SplitSettings(
        {"1": 90.0, "2": 10.0}, baseline="1"
    )
    assert parse_split(split_tree(SplitSettings({"1": 1.0}))) == SplitSettings({"1": 1.0})


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ([], "split is []; write an object with weights, sticky"),
        ({}, "split has no weights; write for example"),
        ({"wieghts": {}}, "split has no key 'wieghts'; did you mean 'weights'?"),
        ({"weights": [1]}, "split.weights is [1]; write versions"),
        ({"weights": {"1": "much"}}, "split.weights.1 is 'much'; write a number"),
        ({"weights": {"1": True}}, "split.weights.1 is True"),
        ({"weights": {"1": 10**400}}, "split.weights.1 is too large"),
        ({"weights": {"1": 1.0, 1: 1.0}}, "names version 1 twice"),
        ({"weights": {"": 1.0}}, "names version '' without a name"),
        ({"weights": {"1": 1}, "sticky": "header"}, "split.sticky is 'header'"),
        ({"weights": {"1": 1}, "sticky": {"header": 3}}, "split.sticky.header is 3; write the name of a header"),
        ({"weights": {"1": 1}, "sticky": {"header": "a b"}}, "split.sticky.header is 'a b'; the name of a header has"),
        ({"weights": {"1": 1}, "rollback": {"least_requests": 1.5}}, "least_requests is 1.5; write a whole number"),
        ({"weights": {"1": 1}, "rollback": {"rate": 1}}, "split.rollback has no key 'rate'"),
        ({"weights": {"1": 1}, "baseline": [1]}, "split.baseline names version [1]"),
    ],
)
def test_a_document_that_is_not_a_split(tree: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_split(tree)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (SplitSettings({}), "has no weights"),
        (SplitSettings({"1": 0.5, "2": 0.4}), "1=0.5 2=0.4 sum to 0.9; write shares that sum to 1, or percentages"),
        (SplitSettings({"1": 1.00001}), "sum to 1.00001"),
        (SplitSettings({"1": 0.0}), "sum to 0"),
        (SplitSettings({"1": 1.5, "2": -0.5}), "the weight of version '2' is -0.5"),
        (SplitSettings({"1": float("nan")}), "the weight of version '1' is nan"),
        (SplitSettings({"1": 1.0}, shadows={"1": 0.5}), "version '1' is a shadow and has a weight too"),
        (
            SplitSettings({"1": 1.0}, shadows={"2": 25.0}),
            "the share of shadow '2' is 25; write a number over 0 and up to 1",
        ),
        (SplitSettings({"1": 1.0}, shadows={"2": 0.0}), "the share of shadow '2' is 0"),
        (SplitSettings({"1": 1.0}, baseline="2"), "the baseline '2' has no weight; use one of 1=1"),
        (SplitSettings({"1": 1.0}, tolerance=-1.0), "tolerance is -1"),
        (SplitSettings({"1": 1.0}, rollback=RollbackRules()), "neither error_rate nor p99_ms"),
        (SplitSettings({"1": 1.0}, rollback=RollbackRules(error_rate=5)), "rollback.error_rate is 5"),
        (SplitSettings({"1": 1.0}, rollback=RollbackRules(p99_ms=-5)), "rollback.p99_ms is -5"),
        (SplitSettings({"1": 1.0}, rollback=RollbackRules(p99_ms=5, least_requests=0)), "rollback.least_requests is 0"),
        (SplitSettings({"1": 1.0}, rollback=RollbackRules(p99_ms=5, window_seconds=0)), "rollback.window_seconds is 0"),
    ],
)
def test_a_split_that_cannot_be(split: SplitSettings, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_split("m", split)
    assert says in caught.value.message and "'m'" in caught.value.message


def test_shares_and_percentages() -> None:
    assert shares_of("m", {"1": 90, "2": 10}) == {"1": 0.9, "2": 0.1}
    assert sum(shares_of("m", {str(n): 0.1 for n in range(10)}).values()) == pytest.approx(1)
    assert shares_of("m", {"1": 1 / 3, "2": 0.6666667})["1"] == pytest.approx(1 / 3, rel=1e-6)


@async_test
async def test_versions_must_be_there() -> None:
    split_plane = SplitPlane()
    labels = {"parameters": {"version_labels": "1=old,2=new,junk"}}
    await split_plane.load(1, echo, **labels)
    await split_plane.load(2, echo, **labels)
    for weights, more, says in (
        ("1=0.5 3=0.5", {}, "model 'm' has no version '3' that serves; these do: 1 (old), 2 (new)"),
        ("1=1", {"shadows": {"newest": 1.0}}, "has no version 'newest'"),
        ("1=0.5 old=0.5", {}, "'1' and 'old' are the same version"),
        ("1=1", {"shadows": {"old": 1.0}}, "'1' and 'old' are the same version"),
        (f"{'9' * 5000}=1", {}, "has no version"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            split_plane.split(weights, **more)
        assert says in caught.value.message
    assert not split_plane.traffic.splits()
    with pytest.raises(NotFound, match="model 'other' is not loaded"):
        split_plane.traffic.set("other", SplitSettings({"1": 1.0}))
    for ask in (split_plane.traffic.remove, split_plane.traffic.state, split_plane.traffic.report):
        with pytest.raises(HeadraceError, match="has no split"):
            ask("m")
    await split_plane.close()


def head_of(*fields: tuple[bytes, bytes]) -> RequestHead:
    return RequestHead(b"POST", b"/predict", fields, version="1.1")


def test_the_key_is_the_first_there_is() -> None:
    sticky = StickyBy(header="X-User-Id", cookie="sid", field="user")
    cookies = (b"cookie", b'a=1; sid="abc"'), (b"cookie", b"b=2")
    assert sticky_key_of(sticky, head_of((b"x-user-id", b" u1 "), *cookies), {"user": "u3"}) == "u1"
    assert sticky_key_of(sticky, head_of(*cookies), {"user": "u3"}) == "abc"
    assert sticky_key_of(sticky, head_of((b"cookie", b"xsid=1; sidx=2")), {"user": 7}) == "7"
    assert sticky_key_of(sticky, head_of(), {"user": [1]}) == sticky_key_of(sticky, head_of(), {}) == ""
    assert sticky_key_of(StickyBy(), head_of(*cookies), {"": "x"}) == ""


@async_test
async def test_a_model_without_a_split_has_no_sticky_key() -> None:
    split_plane = await open_split_plane(echo, echo)
    assert split_plane.traffic.key_of("m", head_of((b"x-user", b"me")), {}) == ""
    split_plane.split("1=0.5 2=0.5", sticky=StickyBy(header="x-user"))
    assert split_plane.traffic.key_of("m", head_of((b"x-user", b"me")), {}) == "me"
    # A header that the server forwards as a parameter means the same.
    assert await split_plane.ask(**{"x-user": "me"}) == await split_plane.ask("me")
    await split_plane.close()
