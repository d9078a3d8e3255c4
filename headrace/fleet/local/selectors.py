# SPDX-License-Identifier: Apache-2.0
"""A router of ours that finds pods by their labels asks an API server, which is not here: it gets their Services instead.

Pure; for `commands`, which changes the words of the router, and `routes`, which has those Services reachable. A Service of
this machine knows who is ready, as the pods of a selector would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.fleet.names import COMPONENT_LABEL, component_name, trunc63
from headrace.fleet.planning.pods import DEFAULT_PORT
from headrace.fleet.planning.site import CLUSTER_DOMAIN

_ROLES = {
    "--discover-pods": "",
    "--discover-prefill-pods": ",role=prefill",
    "--discover-decode-pods": ",role=decode",
}


def with_services(words: Sequence[str], service: str, namespace: str) -> list[str]:
    """The words of a router, with the Service of each component whose pods they select."""
    made: list[str] = []
    for flag, value, written in _flags(words):
        component = _component(value) if flag in _ROLES else ""
        if component:
            host = f"{trunc63(component_name(service, component))}.{namespace}.{CLUSTER_DOMAIN}"
            made.append(f"--backend=http://{host}:{DEFAULT_PORT}{_ROLES[flag]}")
        else:
            made += written
    return made


def selected(words: Sequence[str]) -> set[str]:
    """The components whose pods a router looks for."""
    return {found for flag, value, _ in _flags(words) if flag in _ROLES and (found := _component(value))}


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Each flag with its value, whether they are one word or two; and as it was written."""
    rest = iter(words)
    for word in rest:
        if word in _ROLES:
            value = next(rest, "")
            yield word, value, [word, value]
        else:
            flag, _, value = word.partition("=")
            yield flag, value, [word]


def _component(selector: str) -> str:
    labels = dict(each.split("=", 1) for each in selector.split(",") if "=" in each)
    return labels.get(COMPONENT_LABEL, "")
