# SPDX-License-Identifier: Apache-2.0
"""The tree of prompts: the longest prefix is right, and nobody's part is ever more than it may be."""

from __future__ import annotations

from collections import Counter
from os.path import commonprefix

from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet.router.prefix_tree import NODE_COST, Node, PrefixTree

_TEXTS = st.text("ab", max_size=12) | st.text("abc", min_size=5, max_size=40)
_USERS = st.sampled_from("xyz")
_USES = st.lists(st.tuples(_TEXTS, _USERS), max_size=40)


def _checked(tree: PrefixTree[str]) -> None:
    """What must be so after each use."""
    sizes: Counter[str] = Counter()

    def check_node(node: Node[str], above: set[str] | None) -> None:
        for first, child in node.children.items():
            assert child.edge[0] == first and child.parent is node
            assert child.owners, "a node that nobody has is gone"
            assert above is None or child.owners <= above
            for user in child.owners:
                sizes[user] += len(child.edge) + NODE_COST
            check_node(child, child.owners)

    check_node(tree._root, None)
    for user in "xyz":
        assert tree.size(user) == sizes[user] <= tree.limit


def _most_in_common(text: str, seen: list[str]) -> int:
    return max((len(commonprefix([text, item])) for item in seen), default=0)


@given(_USES, _TEXTS)
def test_the_longest_prefix_is_computed_over_all_texts_seen(uses: list[tuple[str, str]], asked: str) -> None:
    tree: PrefixTree[str] = PrefixTree(1 << 20)
    seen: dict[str, list[str]] = {user: [] for user in "xyz"}
    for text, user in uses:
        tree.add(text, user)
        seen[user].append(text)
        _checked(tree)
    item = {user: _most_in_common(asked, texts) for user, texts in seen.items()}
    best = max(item.values())
    length, users = tree.longest(asked, "xyz")
    assert length == best
    assert set(users) == ({user for user in item if item[user] == best} if best else set())
    for user in "xyz":
        assert tree.longest(asked, user)[0] == item[user]


@given(_USES, st.integers(2 * NODE_COST, 6 * NODE_COST))
def test_a_backend_never_has_more_than_the_bound(uses: list[tuple[str, str]], most: int) -> None:
    tree: PrefixTree[str] = PrefixTree(most)
    for text, user in uses:
        tree.add(text, user)
        _checked(tree)
        # What was used last is there, at least its beginning.
        assert bool(tree.longest(text, user)[0]) == bool(text)


@given(_USES, _USERS)
def test_who_is_forgotten_has_nothing_and_the_others_keep_theirs(uses: list[tuple[str, str]], gone: str) -> None:
    tree: PrefixTree[str] = PrefixTree(1 << 20)
    others: PrefixTree[str] = PrefixTree(1 << 20)
    for text, user in uses:
        tree.add(text, user)
        if user != gone:
            others.add(text, user)
    tree.remove(gone)
    _checked(tree)
    assert tree.size(gone) == 0
    for text, _ in uses:
        assert tree.longest(text, "xyz") == others.longest(text, "xyz")


def test_the_least_recently_used_is_evicted_first() -> None:
    tree: PrefixTree[str] = PrefixTree(3 * (10 + NODE_COST))
    for letter in "abc":
        tree.add(letter * 10, "x")
    tree.add("a" * 10, "x")  # used again
    tree.add("d" * 10, "x")
    assert [tree.longest(letter * 10, "x")[0] for letter in "abcd"] == [10, 0, 10, 10]
    tree.trim(0.5)
    assert [tree.longest(letter * 10, "x")[0] for letter in "abcd"] == [0, 0, 0, 10]


def test_many_texts_of_one_character_more_do_not_outgrow_the_bound() -> None:
    tree: PrefixTree[str] = PrefixTree(50 * NODE_COST)
    for number in range(2000):
        tree.add(f"{number:b}", "x")
    _checked(tree)
