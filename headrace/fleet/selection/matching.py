# SPDX-License-Identifier: Apache-2.0
"""Whether a runtime can serve a model, and the first reason why not.

Called by `index`. An entry of `supportedModelFormats` is compared field by field; one that agrees in all is a match.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from headrace.fleet.selection.measures import fits, parameters, version
from headrace.fleet.words import Document, part, text, whole

_PIPELINE = ("scheduler", "textEncoder", "tokenizer", "transformer", "vae")
DEFAULT_WEIGHT = 1
_WEIGHT_OF_ZERO = {"modelFormat": 10, "modelFramework": 5}
"""What OME counts for a weight of 0."""


class Fit(IntEnum):
    """How well an entry agrees with a model; the smaller the better."""

    EXACT = 0
    NEAR = 1
    """All but the framework's version, of which the first number agrees. OME has no such thing: there every new
    `transformers_version` in a config.json leaves a model without runtimes."""
    NONE = 2


@dataclass(frozen=True)
class Wanted:
    """What of a model decides."""

    architecture: str
    quantization: str
    format: str
    format_version: str
    framework: str
    framework_version: str
    size: str
    pipeline: Document | None


def wanted(model: Document) -> Wanted:
    """The fields of a model that runtimes are chosen by."""
    spec = part(model, "spec")
    pipeline = spec.get("diffusionPipeline")
    return Wanted(
        architecture=text(spec, "modelArchitecture"),
        quantization=text(spec, "quantization"),
        format=text(spec, "modelFormat", "name"),
        format_version=text(spec, "modelFormat", "version"),
        framework=text(spec, "modelFramework", "name"),
        framework_version=text(spec, "modelFramework", "version"),
        size=text(spec, "modelParameterSize"),
        pipeline=part(pipeline) if pipeline is not None else None,
    )


@dataclass(frozen=True)
class Entry:
    """An entry of `supportedModelFormats`, read once."""

    document: Document
    architecture: str
    quantization: str
    format: str | None
    format_version: str
    format_operator: str
    framework: str | None
    framework_version: str
    framework_operator: str
    priority: int
    weights: tuple[int, int]
    auto_select: bool | None
    pipeline: Document | None


def entry(document: Document) -> Entry:
    """An entry as the comparison needs it."""
    auto = document.get("autoSelect")
    return Entry(
        document=document,
        architecture=text(document, "modelArchitecture"),
        quantization=text(document, "quantization"),
        format=text(document, "modelFormat", "name") if part(document, "modelFormat") else None,
        format_version=text(document, "modelFormat", "version"),
        format_operator=text(document, "modelFormat", "operator"),
        framework=text(document, "modelFramework", "name") if part(document, "modelFramework") else None,
        framework_version=text(document, "modelFramework", "version"),
        framework_operator=text(document, "modelFramework", "operator"),
        priority=whole(document, "priority") or 1,
        weights=(_weight(document, "modelFormat"), _weight(document, "modelFramework")),
        auto_select=auto if isinstance(auto, bool) else None,
        pipeline=part(document, "diffusionPipeline") or None,
    )


def _weight(document: Document, name: str) -> int:
    weight = whole(document, name, "weight")
    return DEFAULT_WEIGHT if weight is None else weight or _WEIGHT_OF_ZERO[name]


def compared(model: Wanted, offer: Entry, *, upstream: bool) -> tuple[Fit, str]:
    """How an entry fits, and what does not."""
    reason = next(_differences(model, offer, upstream), "")
    if reason:
        return Fit.NONE, reason
    reason = _framework_version(model, offer, upstream)
    if not reason:
        return Fit.EXACT, ""
    return (Fit.NEAR, reason) if not upstream and _near(model, offer) else (Fit.NONE, reason)


def _differences(model: Wanted, offer: Entry, upstream: bool) -> Iterator[str]:
    if model.architecture != offer.architecture:
        yield _one_sided("architecture", model.architecture, offer.architecture)
    if model.quantization != offer.quantization:
        yield _one_sided("quantization", model.quantization, offer.quantization)
    if offer.format is None:
        yield "the runtime's entry names no model format"
    elif offer.format != model.format:
        yield f"format mismatch (model={model.format or 'none'}, runtime={offer.format})"
    else:
        reason = _version("format", model.format_version, offer.format_version, offer.format_operator, upstream)
        if reason:
            yield reason
    if (offer.framework or "") != model.framework:
        yield _one_sided("framework", model.framework, offer.framework or "")
    if offer.pipeline is not None:
        yield from _pipeline(model.pipeline, offer.pipeline)


def _one_sided(what: str, theirs: str, ours: str) -> str:
    if theirs and ours:
        return f"{what} mismatch (model={theirs}, runtime={ours})"
    if ours:
        return f"the model has no {what}, and the runtime wants {ours}"
    return f"the model has the {what} {theirs}, and the runtime names none"


def _version(what: str, theirs: str, ours: str, operator: str, upstream: bool) -> str:
    if theirs and ours:
        if fits(theirs, ours, operator, upstream=upstream):
            return ""
        return f"{what} version mismatch (model={theirs}, runtime={operator or 'Equal'} {ours})"
    return "" if theirs == ours else _one_sided(f"{what} version", theirs, ours)


def _framework_version(model: Wanted, offer: Entry, upstream: bool) -> str:
    if not offer.framework:
        return ""
    return _version("framework", model.framework_version, offer.framework_version, offer.framework_operator, upstream)


def _near(model: Wanted, offer: Entry) -> bool:
    """Whether the framework's versions are of one line. Who wrote an operator other than Equal meant a bound."""
    if offer.framework_operator not in ("", "Equal"):
        return False
    theirs, ours = version(model.framework_version), version(offer.framework_version)
    if not model.framework_version or not offer.framework_version:
        return True
    return theirs is not None and ours is not None and theirs.numbers[0] == ours.numbers[0]


def _pipeline(model: Document | None, offer: Document) -> Iterator[str]:
    if model is None:
        yield "the runtime wants a diffusion pipeline, and the model has none"
        return
    if text(offer, "className") and text(offer, "className") != text(model, "className"):
        yield _one_sided("pipeline class", text(model, "className"), text(offer, "className"))
    parts = [(name, part(offer).get(name), part(model).get(name)) for name in _PIPELINE]
    others = part(offer, "additionalComponents")
    parts += [(name, others[name], part(model, "additionalComponents").get(name)) for name in sorted(others)]
    for name, ours, theirs in parts:
        if ours is None:
            continue
        if theirs is None:
            yield f"the runtime wants the pipeline component {name}, and the model has none"
        for field in ("library", "type"):
            if text(ours, field) and text(ours, field) != text(theirs, field):
                yield _one_sided(f"{field} of {name}", text(theirs, field), text(ours, field))


def score(model: Wanted, offers: tuple[Entry, ...], *, upstream: bool, near: bool = False) -> int:
    """What a runtime counts: the best of the entries that auto-selection may use, by format and framework alone."""
    best = 0
    for offer in offers:
        if offer.auto_select is False:
            continue
        count = 0
        if offer.format is not None:
            # Here, unlike in a match, a version on one side only is no difference.
            if offer.format != model.format or not _loosely(
                model.format_version, offer.format_version, offer.format_operator, upstream
            ):
                continue
            count += offer.weights[0]
        if offer.framework and model.framework:
            loose = _loosely(model.framework_version, offer.framework_version, offer.framework_operator, upstream)
            if offer.framework != model.framework or not (loose or (near and _near(model, offer))):
                continue
            count += offer.weights[1]
        elif offer.framework or model.framework:
            continue
        best = max(best, count * offer.priority)
    return best


def _loosely(theirs: str, ours: str, operator: str, upstream: bool) -> bool:
    return not theirs or not ours or fits(theirs, ours, operator, upstream=upstream)


def size_reason(size: str, least: str, most: str, *, upstream: bool) -> str:
    """Why a model of that size is not for a runtime with that range; "" if it is."""
    if not size or not (least or most):
        return ""
    if upstream and not (least and most):
        return "the runtime's size range has one end only, which OME cannot compare"
    number = parameters(size)
    if least and number < parameters(least):
        return f"model size {size} is below the runtime's least, {least}"
    if most and number > parameters(most):
        return f"model size {size} is above the runtime's most, {most}"
    return ""


def size_distance(size: str, least: str, most: str, *, upstream: bool) -> tuple[int, float]:
    """How far the ends of a range are from a size; an end that nobody wrote is farther than any.

    For OME a runtime without a range is at distance 0, so that it wins before those made for the size.
    """
    ends = [parameters(end) for end in (least, most) if end]
    if not size:
        return 0, 0.0
    distance = sum(abs(end - parameters(size)) for end in ends)
    return (0, distance) if upstream else (2 - len(ends), distance)
