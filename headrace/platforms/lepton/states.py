# SPDX-License-Identifier: Apache-2.0
"""What the Lepton API tells of a deployment, in the launcher's words. Called by `driver`; does nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.platforms.contract import Observed

_COMING = ("Starting", "Updating", "Scaling", "Migrating", "Restarting")
_NEVER = Observed("ended", word="Failed", reason="it was never started: its start was cut short")


def never_started() -> Observed:
    """Of a job of which there are secrets and no deployment."""
    return _NEVER


def state_of(deployment: Mapping[str, Any]) -> str:
    """The deployment's own word; `phase` is truer where there is one, since `state` hides that it was stopped."""
    status = deployment.get("status")
    told = status if isinstance(status, Mapping) else {}
    return str(told.get("phase") or told.get("state") or "")


def needs_more(deployment: Mapping[str, Any]) -> bool:
    """Whether only its terminations and issues tell how it is."""
    return state_of(deployment) in ("Not Ready", "Error", "Restarting")


def observed(
    deployment: Mapping[str, Any],
    terminations: Mapping[str, Any] | None = None,
    issues: Mapping[str, Any] | None = None,
) -> Observed:
    """How a deployment is. A replica that ended counts as ended although the platform tries it again and again."""
    name = id_of(deployment)
    state = state_of(deployment)
    last = _last(terminations or {})
    if state == "Ready":
        return Observed("running", name, "Running")
    if state == "Deleting":
        return Observed("ended", name, "Terminating", reason="it is being taken down")
    if state in ("Stopping", "Stopped"):
        return Observed("ended", name, "Succeeded", reason="it was stopped on the platform: it has no replicas")
    if last is not None and state not in ("Starting", "Updating"):
        code = last.get("exit_code")
        exit_code = code if isinstance(code, int) else None
        told = ", ".join(str(last[key])[:500] for key in ("reason", "message") if last.get(key))
        reason = f"the container ended with code {exit_code}" + (f" ({told})" if told else "")
        return Observed("ended", name, "Succeeded" if exit_code == 0 else "Failed", exit_code, reason)
    if state == "Error":
        return Observed("ended", name, "Failed", reason=_issue(issues or {}) or "the platform tells an error")
    if state in _COMING or state == "Not Ready":
        return Observed("starting", name, "Pending", reason=_issue(issues or {}))
    return Observed("starting", name, "Unknown")


def id_of(deployment: Mapping[str, Any]) -> str:
    """By what the API is asked for it."""
    metadata = deployment.get("metadata")
    told = metadata if isinstance(metadata, Mapping) else {}
    return str(told.get("id") or told.get("name") or "")


def name_told(deployment: Mapping[str, Any]) -> str:
    """What whoever made it called it."""
    metadata = deployment.get("metadata")
    told = metadata if isinstance(metadata, Mapping) else {}
    return str(told.get("name") or told.get("id") or "")


def endpoint_of(deployment: Mapping[str, Any]) -> str | None:
    """Where it is called from outside."""
    status = deployment.get("status")
    endpoint = status.get("endpoint") if isinstance(status, Mapping) else None
    url = endpoint.get("external_endpoint") if isinstance(endpoint, Mapping) else None
    return str(url).rstrip("/") if url else None


def lines_of(answer: object, tail: int) -> str:
    """The last lines of what the log query told: streams of pairs of a time and a line."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    streams = data.get("result") if isinstance(data, Mapping) else None
    pairs: list[tuple[int, str]] = []
    for stream in streams if isinstance(streams, Sequence) else ():
        for moment, line in stream.get("values") or ():
            pairs.append((int(moment), str(line)))
    pairs.sort(key=lambda pair: pair[0])
    return "\n".join("\n".join(line for _, line in pairs).splitlines()[-tail:]) if tail > 0 else ""


def _last(terminations: Mapping[str, Any]) -> Mapping[str, Any] | None:
    every = [each for many in terminations.values() if isinstance(many, list) for each in many]
    found = [each for each in every if isinstance(each, Mapping)]
    return max(found, key=lambda each: each.get("finished_at") or 0, default=None)


def _issue(issues: Mapping[str, Any]) -> str:
    for many in issues.values():
        for each in many if isinstance(many, list) else ():
            if isinstance(each, Mapping) and each.get("reason") not in (None, "Ready"):
                return f"{each['reason']}: {each.get('message') or ''}"[:500].rstrip(": ")
    return ""
