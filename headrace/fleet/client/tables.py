# SPDX-License-Identifier: Apache-2.0
"""Summaries of services, and documents as rows of a table with the columns of their kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from headrace.fleet.names import DEPLOYMENT_MODE, PD_DISAGGREGATED, VIRTUAL
from headrace.fleet.status.conditions import LATEST_DEPLOYMENT_READY, READY, condition_of, get_mappings
from headrace.fleet.status.model_status import BLOCKED, INVALID
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

_SHORT = 120
"""Maximum length of a reason in a table; `wide` and `describe` show all of it."""

Cell = Callable[[Document, datetime], str]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    cell: Cell
    wide: bool = False
    """Only with `-o wide`."""


def columns_of(kinds: Iterable[str], *, wide: bool = False, spaces: bool = False) -> list[Column]:
    """Return the columns of kinds that are shown together. `spaces`: with the namespace."""
    first = next(iter(kinds))
    columns = [column for column in _TABLES[first] if wide or not column.wide]
    if wide:
        columns = [Column(column.name, _full_reason) if column.name == "REASON" else column for column in columns]
    space = Column("NAMESPACE", lambda document, _: get_str(document, "metadata", "namespace"))
    return [space, *columns] if spaces else columns


def cells(document: Document, columns: Iterable[Column], now: datetime) -> list[str]:
    """Return one row; empty cells are `-`."""
    return [column.cell(document, now) or "-" for column in columns]


def _name(document: Document, _: datetime) -> str:
    return name_of(document)


def _age(document: Document, now: datetime) -> str:
    return age(get_str(document, "metadata", "creationTimestamp"), now)


def _field(*path: str) -> Cell:
    def cell(document: Document, _: datetime) -> str:
        value = get_mapping(document, *path[:-1]).get(path[-1])
        if isinstance(value, bool):
            return "true" if value else ""
        return str(value) if isinstance(value, str | int | float) else ""

    return cell


def _summary_field(field: str) -> Cell:
    return lambda document, _: str(getattr(summary(document), field))


def _replicas(document: Document, _: datetime) -> str:
    shown = summary(document)
    return f"{shown.ready_replicas}/{shown.replicas}"


def _full_reason(document: Document, _: datetime) -> str:
    if kind_of(document) == "BenchmarkJob":
        return get_str(document, "status", "failureMessage")
    return summary(document).reason


def _reason(document: Document, now: datetime) -> str:
    value = _full_reason(document, now)
    return value if len(value) <= _SHORT else f"{value[: _SHORT - 3].rstrip()}..."


def _nodes(document: Document, _: datetime) -> str:
    up, failed = len(get_list(document, "status", "nodesReady")), len(get_list(document, "status", "nodesFailed"))
    return f"{up} ready" + (f", {failed} failed" if failed else "") if up or failed else ""


def _formats(document: Document, _: datetime) -> str:
    names = [
        get_str(record, "modelFormat", "name") or get_str(record, "name")
        for record in get_mappings(document, "spec", "supportedModelFormats")
    ]
    return ", ".join(dict.fromkeys(name for name in names if name))


def _sizes(document: Document, _: datetime) -> str:
    minimum, maximum = (get_str(document, "spec", "modelSizeRange", name) for name in ("min", "max"))
    return f"{minimum}-{maximum}" if minimum or maximum else ""


def _image(document: Document, _: datetime) -> str:
    engine = get_mapping(document, "spec", "engineConfig")
    for runner in (
        get_mapping(engine, "runner"),
        get_mapping(engine, "leader", "runner"),
        *get_mappings(document, "spec", "containers"),
    ):
        if get_str(runner, "image"):
            return get_str(runner, "image")
    return ""


def _endpoint(document: Document, _: datetime) -> str:
    endpoint = get_mapping(document, "spec", "endpoint")
    return get_str(endpoint, "inferenceService", "name") or get_str(endpoint, "endpoint", "url")


def _memory(document: Document, _: datetime) -> str:
    gigabytes = get_mapping(document, "spec", "capabilities").get("memoryGB")
    return f"{gigabytes} GB" if gigabytes else ""


def _free(document: Document, _: datetime) -> str:
    total, free = (get_int(document, "status", name) for name in ("totalAccelerators", "availableAccelerators"))
    return f"{free or 0}/{total}" if total is not None else ""


_NAME, _AGE, _KIND = Column("NAME", _name), Column("AGE", _age), Column("KIND", lambda document, _: kind_of(document))
_DISABLED = Column("DISABLED", _field("spec", "disabled"))

_SERVICES = (
    _NAME,
    Column("URL", _summary_field("url")),
    Column("READY", _summary_field("ready")),
    Column("MODE", _summary_field("mode")),
    Column("MODEL", _summary_field("model")),
    Column("RUNTIME", _summary_field("runtime")),
    Column("REPLICAS", _replicas),
    Column("TRAFFIC", _summary_field("traffic")),
    Column("STATE", _summary_field("state"), wide=True),
    Column("ADDRESS", _summary_field("address"), wide=True),
    Column("REVISION", _field("status", "components", "engine", "latestReadyRevision"), wide=True),
    _AGE,
    Column("REASON", _reason),
)
_MODELS = (
    _NAME,
    _KIND,
    Column("FORMAT", _field("spec", "modelFormat", "name")),
    Column("ARCHITECTURE", _field("spec", "modelArchitecture")),
    Column("SIZE", _field("spec", "modelParameterSize")),
    Column("QUANTIZATION", _field("spec", "quantization"), wide=True),
    Column("STORAGE", _field("spec", "storage", "storageUri"), wide=True),
    Column("PATH", _field("spec", "storage", "path"), wide=True),
    _DISABLED,
    Column("STATE", _field("status", "state")),
    Column("NODES", _nodes),
    _AGE,
)
_RUNTIMES = (
    _NAME,
    _KIND,
    _DISABLED,
    Column("FORMATS", _formats),
    Column("SIZES", _sizes),
    Column("IMAGE", _image),
    _AGE,
)
_WEIGHTS = (
    _NAME,
    Column("MODEL", _field("spec", "baseModelRef", "name")),
    Column("TYPE", _field("spec", "modelType")),
    Column("STORAGE", _field("spec", "storage", "storageUri"), wide=True),
    _DISABLED,
    Column("STATE", _field("status", "state")),
    _AGE,
)
_ACCELERATORS = (
    _NAME,
    Column("VENDOR", _field("spec", "vendor")),
    Column("FAMILY", _field("spec", "family")),
    Column("MODEL", _field("spec", "model")),
    Column("MEMORY", _memory),
    Column("NODES", _field("status", "availableNodes")),
    Column("FREE", _free),
    _AGE,
)
_BENCHMARKS = (
    _NAME,
    Column("ENDPOINT", _endpoint),
    Column("TASK", _field("spec", "task")),
    Column("STATE", _field("status", "state")),
    Column("STARTED", _field("status", "startTime")),
    Column("COMPLETED", _field("status", "completionTime")),
    Column("RESULTS", _field("spec", "outputLocation", "storageUri"), wide=True),
    _AGE,
    Column("REASON", _reason),
)

_TABLES: dict[str, tuple[Column, ...]] = {
    "InferenceService": _SERVICES,
    "BaseModel": _MODELS,
    "ClusterBaseModel": _MODELS,
    "ServingRuntime": _RUNTIMES,
    "ClusterServingRuntime": _RUNTIMES,
    "FineTunedWeight": _WEIGHTS,
    "AcceleratorClass": _ACCELERATORS,
    "BenchmarkJob": _BENCHMARKS,
}


_FAILURES = frozenset({"ReconcileError", "InternalError", "ProgressDeadlineExceeded", "RolledBack"})
_CONDITION_PREFIX = re.compile(r"^[A-Z][A-Za-z]*Ready: ")

NOT_RECONCILED = "the operator has not reconciled it yet"
CHANGE_NOT_RECONCILED = "the operator has not reconciled the last change yet"


@dataclass(frozen=True)
class Summary:
    """A service in one row."""

    namespace: str
    name: str
    ready: str
    """True, False or Unknown."""
    url: str
    address: str
    mode: str
    model: str
    runtime: str
    ready_replicas: int
    replicas: int
    traffic: str
    """`20% new, 80% old`."""
    state: str
    """Of the model: Pending, Loading, Loaded, Standby, FailedToLoad."""
    reason: str
    """Why it is not ready; "" if it is."""
    created: str


def summary(service: Document) -> Summary:
    """Return the summary of a service."""
    status = get_mapping(service, "status")
    components = components_of(service)
    condition = condition_of(service, READY)
    return Summary(
        namespace=get_str(service, "metadata", "namespace"),
        name=name_of(service),
        ready=get_str(condition, "status") or "Unknown",
        url=get_str(status, "url"),
        address=get_str(status, "address", "url"),
        mode=mode_of(service),
        model=get_str(status, "model", "name") or get_str(service, "spec", "model", "name"),
        runtime=get_str(status, "runtime", "name") or get_str(service, "spec", "runtime", "name"),
        ready_replicas=sum(get_int(component, "readyReplicas") or 0 for component in components.values()),
        replicas=sum(get_int(component, "replicas") or 0 for component in components.values()),
        traffic=traffic_of(components.values()),
        state=get_str(status, "modelStatus", "modelRevisionStates", "targetModelState"),
        reason=reason_of(service),
        created=get_str(service, "metadata", "creationTimestamp"),
    )


def components_of(service: Document) -> dict[str, Document]:
    """Return the status of each component."""
    components = get_mapping(service, "status", "components")
    return {name: get_mapping(components, name) for name in components}


def mode_of(service: Document) -> str:
    """Return the deployment mode of a service, or that of its engine."""
    value = annotations_of(service).get(DEPLOYMENT_MODE, "")
    if value in (VIRTUAL, PD_DISAGGREGATED):
        return value
    if get_mapping(service, "spec").get("decoder") is not None:
        return PD_DISAGGREGATED
    return get_str(service, "status", "components", "engine", "mode") or value


def traffic_of(components: Iterable[Document]) -> str:
    """Return the traffic shares of the component with two revisions; `100%` if none has two."""
    traffic = ""
    for component in components:
        shares = get_mappings(component, "traffic")
        if len(shares) > 1:
            new = sum(get_int(share, "percent") or 0 for share in shares if share.get("latestRevision") is True)
            return f"{new}% new, {100 - new}% old"
        traffic = traffic or ("100%" if shares else "")
    return traffic


def reason_of(service: Document) -> str:
    """Return why a service is not ready or its last change is not rolled out; "" otherwise."""
    if not get_mapping(service, "status"):
        return NOT_RECONCILED
    if not is_current(service):
        return CHANGE_NOT_RECONCILED
    for kind in (READY, LATEST_DEPLOYMENT_READY):
        condition = condition_of(service, kind)
        if condition is not None and get_str(condition, "status") != "True":
            return _reason_text(get_str(condition, "reason"), get_str(condition, "message"))
    return "" if condition_of(service, READY) is not None else NOT_RECONCILED


def is_current(service: Document) -> bool:
    """Whether the status is about the current spec."""
    generation = get_int(service, "metadata", "generation")
    return generation is None or (get_int(service, "status", "observedGeneration") or 0) >= generation


Progress = Literal["ready", "invalid", "failing", "waiting"]


def progress_of(service: Document) -> Progress:
    """Return the progress of a service. `invalid`: it must be edited; `failing`: pods fail, and may recover."""
    if not is_current(service) or condition_of(service, READY) is None:
        return "waiting"
    ready, rolled_out = (get_str(condition_of(service, kind), "status") for kind in (READY, LATEST_DEPLOYMENT_READY))
    if ready == "True" and rolled_out in ("", "True"):
        return "ready"
    transition = get_str(service, "status", "modelStatus", "transitionStatus")
    if transition == INVALID:
        return "invalid"
    # A pod that waits for a node or its image does not count as failing.
    reasons = {get_str(condition_of(service, kind), "reason") for kind in (READY, LATEST_DEPLOYMENT_READY)}
    return "failing" if transition == BLOCKED or reasons & _FAILURES else "waiting"


def age(created: str, now: datetime) -> str:
    """Return `5s`, `12m`, `3h` or `40d`: as kubectl, but with one unit."""
    try:
        since = datetime.fromisoformat(created)
    except ValueError:
        return "-"
    seconds = max(int((now - (since if since.tzinfo else since.replace(tzinfo=UTC))).total_seconds()), 0)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _reason_text(reason: str, message: str) -> str:
    """Return `ImagePullBackOff: container ome-container: no such image`."""
    text = " ".join(message.split())
    value = _CONDITION_PREFIX.sub("", text)
    if value in ("", reason):
        # A bare reason, such as Waiting: the name of the condition says more.
        return text or reason
    return value if not reason or reason in value else f"{reason}: {value}"
