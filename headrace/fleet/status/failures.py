# SPDX-License-Identifier: Apache-2.0
"""The status of a service that cannot be made as it is written: what to change, in every place where people look.

What ran before goes on, so what was known of it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from headrace.fleet.status.conditions import READY, Condition, Truth, shortened, time_text, written
from headrace.fleet.status.models import INVALID
from headrace.fleet.status.observed import records
from headrace.fleet.status.pods import FAILED, PENDING
from headrace.fleet.words import Document, Problem, part, text, whole

_INVALID_SPEC = "InvalidPredictorSpec"
"""The word that the CRD has for a spec that cannot be; its predictor is the engine of today."""
_SHOWN = 5


def status_of_problems(
    service: Document, problems: Sequence[Problem], now: datetime, *, failure: str = "", reason: str = ""
) -> Document:
    """Ready is False, with all problems in its message.

    failure: the FailureReason, where selection knows it. reason: that of the condition, where it is none of the spec's
    fault (`ReconcileError`); `modelStatus` stays as it was then.
    """
    why = failure or failure_of(problems)
    message = shortened_problems(problems)
    before = part(service, "status")
    condition = Condition(READY, "False", reason or (why if why != _INVALID_SPEC else INVALID), message)
    made: dict[str, Any] = {
        **before,
        "conditions": written([condition, *_others(before)], service, now),
        "modelStatus": part(before, "modelStatus") if reason else _model_status(before, why, message, now),
    }
    if whole(service, "metadata", "generation") is not None:
        made["observedGeneration"] = whole(service, "metadata", "generation")
    return {name: value for name, value in made.items() if value != {}}


def failure_of(problems: Sequence[Problem]) -> str:
    """The FailureReason that goes with the first problem that has one."""
    for each in problems:
        disabled = "disabled" in each.message
        if each.field in ("spec.model.name", "spec.model.kind"):
            return "BaseModelNotReady" if disabled else "BaseModelNotFound"
        if each.field == "spec.runtime.name":
            return "RuntimeDisabled" if disabled else "RuntimeNotRecognized"
    return _INVALID_SPEC


def shortened_problems(problems: Sequence[Problem]) -> str:
    """The first few, one after the other, and how many more there are."""
    said = "; ".join(str(each) for each in problems[:_SHOWN])
    return said + (f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")


def _others(before: Document) -> list[Condition]:
    """The conditions that were told, all but Ready: their objects have not been touched."""
    found = []
    for each in records(before, "conditions"):
        if text(each, "type") in ("", READY):
            continue
        status: Truth = "True" if text(each, "status") == "True" else "False"
        if text(each, "status") not in ("True", "False"):
            status = "Unknown"
        informs = text(each, "severity") == "Info"
        found.append(Condition(text(each, "type"), status, text(each, "reason"), text(each, "message"), informs))
    return found


def _model_status(before: Document, why: str, message: str, now: datetime) -> dict[str, Any]:
    active = text(before, "modelStatus", "modelRevisionStates", "activeModelState", default=PENDING)
    info = {"reason": why, "message": shortened(message)}
    told = part(before, "modelStatus", "lastFailureInfo")
    same = all(told.get(name) == value for name, value in info.items())
    made: dict[str, Any] = {
        "transitionStatus": INVALID,
        "modelRevisionStates": {"activeModelState": active, "targetModelState": FAILED},
        "lastFailureInfo": {**info, "time": text(told, "time") if same else time_text(now)},
    }
    if part(before, "modelStatus", "modelCopies"):
        made["modelCopies"] = part(before, "modelStatus", "modelCopies")
    return made
