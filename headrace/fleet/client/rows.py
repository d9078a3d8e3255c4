# SPDX-License-Identifier: Apache-2.0
"""Documents as rows of a table, each kind with its own columns. Pure: what a cell looks like is the printer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from headrace.fleet.client.summaries import age, summary
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, items, kind_of, name_of, part, text, whole

_SHORT = 120
"""So much of a reason fits beside the rest; `wide` and `describe` have all of it."""

Cell = Callable[[Document, datetime], str]


@dataclass(frozen=True)
class Column:
    """A heading, and what stands below it."""

    name: str
    cell: Cell
    wide: bool = False
    """Only with `-o wide`."""


def columns_of(kinds: Iterable[str], *, wide: bool = False, spaces: bool = False) -> list[Column]:
    """The columns for kinds that are shown together. `spaces`: of all namespaces."""
    first = next(iter(kinds))
    found = [each for each in _TABLES[first] if wide or not each.wide]
    if wide:
        found = [Column(each.name, _full_reason) if each.name == "REASON" else each for each in found]
    space = Column("NAMESPACE", lambda document, _: text(document, "metadata", "namespace"))
    return [space, *found] if spaces else found


def cells(document: Document, columns: Iterable[Column], now: datetime) -> list[str]:
    """One row; what is not there is `-`."""
    return [each.cell(document, now) or "-" for each in columns]


def _name(document: Document, _: datetime) -> str:
    return name_of(document)


def _age(document: Document, now: datetime) -> str:
    return age(text(document, "metadata", "creationTimestamp"), now)


def _at(*path: str) -> Cell:
    def cell(document: Document, _: datetime) -> str:
        found = part(document, *path[:-1]).get(path[-1])
        if isinstance(found, bool):
            return "true" if found else ""
        return str(found) if isinstance(found, str | int | float) else ""

    return cell


def _of(field: str) -> Cell:
    return lambda document, _: str(getattr(summary(document), field))


def _replicas(document: Document, _: datetime) -> str:
    told = summary(document)
    return f"{told.ready_replicas}/{told.replicas}"


def _full_reason(document: Document, _: datetime) -> str:
    if kind_of(document) == "BenchmarkJob":
        return text(document, "status", "failureMessage")
    return summary(document).reason


def _reason(document: Document, now: datetime) -> str:
    said = _full_reason(document, now)
    return said if len(said) <= _SHORT else f"{said[: _SHORT - 3].rstrip()}..."


def _nodes(document: Document, _: datetime) -> str:
    up, failed = len(items(document, "status", "nodesReady")), len(items(document, "status", "nodesFailed"))
    return f"{up} ready" + (f", {failed} failed" if failed else "") if up or failed else ""


def _formats(document: Document, _: datetime) -> str:
    found = [
        text(each, "modelFormat", "name") or text(each, "name")
        for each in records(document, "spec", "supportedModelFormats")
    ]
    return ", ".join(dict.fromkeys(each for each in found if each))


def _sizes(document: Document, _: datetime) -> str:
    least, most = (text(document, "spec", "modelSizeRange", each) for each in ("min", "max"))
    return f"{least}-{most}" if least or most else ""


def _image(document: Document, _: datetime) -> str:
    engine = part(document, "spec", "engineConfig")
    for runner in (part(engine, "runner"), part(engine, "leader", "runner"), *records(document, "spec", "containers")):
        if text(runner, "image"):
            return text(runner, "image")
    return ""


def _endpoint(document: Document, _: datetime) -> str:
    where = part(document, "spec", "endpoint")
    return text(where, "inferenceService", "name") or text(where, "endpoint", "url")


def _memory(document: Document, _: datetime) -> str:
    found = part(document, "spec", "capabilities").get("memoryGB")
    return f"{found} GB" if found else ""


def _free(document: Document, _: datetime) -> str:
    total, free = (whole(document, "status", each) for each in ("totalAccelerators", "availableAccelerators"))
    return f"{free or 0}/{total}" if total is not None else ""


_NAME, _AGE, _KIND = Column("NAME", _name), Column("AGE", _age), Column("KIND", lambda each, _: kind_of(each))
_DISABLED = Column("DISABLED", _at("spec", "disabled"))

_SERVICES = (
    _NAME,
    Column("URL", _of("url")),
    Column("READY", _of("ready")),
    Column("MODE", _of("mode")),
    Column("MODEL", _of("model")),
    Column("RUNTIME", _of("runtime")),
    Column("REPLICAS", _replicas),
    Column("TRAFFIC", _of("traffic")),
    Column("STATE", _of("state"), wide=True),
    Column("ADDRESS", _of("address"), wide=True),
    Column("REVISION", _at("status", "components", "engine", "latestReadyRevision"), wide=True),
    _AGE,
    Column("REASON", _reason),
)
_MODELS = (
    _NAME,
    _KIND,
    Column("FORMAT", _at("spec", "modelFormat", "name")),
    Column("ARCHITECTURE", _at("spec", "modelArchitecture")),
    Column("SIZE", _at("spec", "modelParameterSize")),
    Column("QUANTIZATION", _at("spec", "quantization"), wide=True),
    Column("STORAGE", _at("spec", "storage", "storageUri"), wide=True),
    Column("PATH", _at("spec", "storage", "path"), wide=True),
    _DISABLED,
    Column("STATE", _at("status", "state")),
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
    Column("MODEL", _at("spec", "baseModelRef", "name")),
    Column("TYPE", _at("spec", "modelType")),
    Column("STORAGE", _at("spec", "storage", "storageUri"), wide=True),
    _DISABLED,
    Column("STATE", _at("status", "state")),
    _AGE,
)
_ACCELERATORS = (
    _NAME,
    Column("VENDOR", _at("spec", "vendor")),
    Column("FAMILY", _at("spec", "family")),
    Column("MODEL", _at("spec", "model")),
    Column("MEMORY", _memory),
    Column("NODES", _at("status", "availableNodes")),
    Column("FREE", _free),
    _AGE,
)
_BENCHMARKS = (
    _NAME,
    Column("ENDPOINT", _endpoint),
    Column("TASK", _at("spec", "task")),
    Column("STATE", _at("status", "state")),
    Column("STARTED", _at("status", "startTime")),
    Column("COMPLETED", _at("status", "completionTime")),
    Column("RESULTS", _at("spec", "outputLocation", "storageUri"), wide=True),
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
