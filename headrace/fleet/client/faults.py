# SPDX-License-Identifier: Apache-2.0
"""What an API server refuses, and that it does not answer, as one line each that says what to do. Pure."""

from __future__ import annotations

import re

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from headrace.fleet.client.contract import MANAGER
from headrace.fleet.cluster.api import Refused, Unreachable

INSTALL = "headrace operator manifests | kubectl apply -f -"
_LONGEST = 600
_WITH = re.compile(r'conflicts? with "([^"]*)"')


def fault(error: Refused | Unreachable, doing: str, server: str) -> HeadraceError:
    """The error for people. `doing`: `listing InferenceServices`."""
    if isinstance(error, Unreachable):
        return Unavailable(
            f"the API server {server} does not answer ({error}): check that it runs and that `kubectl cluster-info` gets"
            " through, or name another --context"
        )
    said = " ".join(error.said.split())[:_LONGEST]
    if error.code == 401:
        return Unauthenticated(f"the API server {server} does not know you: log in to the cluster again")
    if error.code == 403 and " cannot " in said:
        return PermissionDenied(f"you may not do that ({said}): ask for that right, or name another --context")
    if is_absent_kind(error):
        return FailedPrecondition(f"{doing}: the cluster {server} does not have that kind; run `{INSTALL}`")
    if error.code == 404 and said.startswith("namespaces "):
        return FailedPrecondition(f"{doing}: {said}; create it first, or name another with -n")
    if error.code == 409 and is_conflict(error):
        return FailedPrecondition(
            f"{doing}: {said}; change the file to what is there, or take the fields over with --force-conflicts"
        )
    if error.code == 409:
        return Unavailable(f"{doing}: somebody changed it at the same time; try again")
    if error.code == 429 or error.code >= 500:
        return Unavailable(f"{doing}: the API server cannot do it now ({said or error.code}); try again later")
    if error.code == 403:
        return FailedPrecondition(f"{doing}: a rule of the cluster forbids it ({said}); change what is named there")
    return InvalidArgument(f"{doing}: the API server does not take it: {said}")


def is_absent_kind(refused: Refused) -> bool:
    """Whether the kind itself is not there. Where an object is missing, the API server names it; here it does not."""
    return refused.code == 404 and refused.reason != "NotFound"


def is_conflict(refused: Refused) -> bool:
    """Whether an apply was refused because somebody else has set the fields."""
    return refused.code == 409 and bool(_WITH.findall(refused.said))


def conflicts_with_us(refused: Refused) -> bool:
    """Whether all who set the fields otherwise are verbs of ours: `rollout` changes what `apply` made."""
    return is_conflict(refused) and set(_WITH.findall(refused.said)) == {MANAGER}
