# SPDX-License-Identifier: Apache-2.0
"""What an API server refuses, and what goes wrong on the way to it, as errors of ours that say what to do. No I/O."""

from __future__ import annotations

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

_TOLD_CHARACTERS = 500


def refusal(code: int | None, reason: str, message: str, doing: str) -> HeadraceError:
    """An answer that is not what was asked for. `doing`: "making the Job x in namespace y"."""
    told = " ".join(message.split())[:_TOLD_CHARACTERS]
    if code == 401:
        return FailedPrecondition(
            f"{doing}: the cluster does not know whose request it is; log in to it again ({told})"
        )
    if code == 403 or reason == "Forbidden":
        return _forbidden(told, doing)
    if code == 404 and "namespaces" in told:
        return FailedPrecondition(f"{doing}: there is no such namespace; make it, or name another ({told})")
    if code == 404:
        return FailedPrecondition(f"{doing}: the cluster does not have it ({told})")
    if code == 409:
        return Unavailable(f"{doing}: somebody else changed it at the same time; try again ({told})")
    if code == 413:
        return InvalidArgument(f"{doing}: it is larger than the cluster takes; make its variables shorter ({told})")
    if code == 429:
        return Unavailable(f"{doing}: the API server has too much to do; try again later ({told})")
    if _is_admission(told):
        return _refused(told, doing)
    if code is not None and 400 <= code < 500:
        return InvalidArgument(f"{doing}: the cluster does not take it: {told}")
    return Unavailable(f"{doing}: the API server answers with an error; try again later ({told})")


def _forbidden(told: str, doing: str) -> HeadraceError:
    if "exceeded quota" in told:
        return ResourceExhausted(
            f"{doing}: the namespace's quota is used up; stop something, or have it raised ({told})"
        )
    if _is_admission(told) or ("forbidden: " in told and " cannot " not in told):
        return _refused(told, doing)
    return FailedPrecondition(
        f"{doing}: the cluster does not allow it ({told}); have the role of the guide kubernetes-services.md given to you"
    )


def _refused(told: str, doing: str) -> HeadraceError:
    return FailedPrecondition(
        f"{doing}: a rule of the cluster refuses it ({told}); change the settings named there, or ask for an exception"
    )


def _is_admission(told: str) -> bool:
    return "admission webhook" in told or "violates PodSecurity" in told or "ValidatingAdmissionPolicy" in told


def unreachable(server: str, doing: str, kind: str) -> HeadraceError:
    """No answer at all. `kind`: the exception's class, which is all that may be told of it."""
    return Unavailable(
        f"{doing}: the API server {server} does not answer ({kind}); is it the right one, and can it be reached?"
    )
