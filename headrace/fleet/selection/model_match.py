# SPDX-License-Identifier: Apache-2.0
"""Whether a runtime can serve a model, and the first reason why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from headrace.platforms.kubernetes_client.objects import Document, get_int, get_mapping, get_str, name_of

_PIPELINE = ("scheduler", "textEncoder", "tokenizer", "transformer", "vae")
DEFAULT_WEIGHT = 1
_WEIGHT_OF_ZERO = {"modelFormat": 10, "modelFramework": 5}
"""Weights that OME uses instead of 0."""


class Fit(IntEnum):
    """How well a supported format matches a model; smaller is better."""

    EXACT = 0
    NEAR = 1
    """All but the framework's version, whose major version matches. OME has no such match: there a new
    `transformers_version` in a config.json leaves a model without a runtime."""
    NONE = 2


@dataclass(frozen=True)
class ModelRequirements:
    """The fields of a model that a runtime must match."""

    architecture: str
    quantization: str
    format: str
    format_version: str
    framework: str
    framework_version: str
    size: str
    named_size: str
    """The size in the model's name, for a model that does not declare one; "" if its name has none."""
    pipeline: Document | None


def requirements_of(model: Document) -> ModelRequirements:
    """Read the fields of a model that a runtime must match."""
    spec = get_mapping(model, "spec")
    pipeline, size = spec.get("diffusionPipeline"), get_str(spec, "modelParameterSize")
    return ModelRequirements(
        architecture=get_str(spec, "modelArchitecture"),
        quantization=get_str(spec, "quantization"),
        format=get_str(spec, "modelFormat", "name"),
        format_version=get_str(spec, "modelFormat", "version"),
        framework=get_str(spec, "modelFramework", "name"),
        framework_version=get_str(spec, "modelFramework", "version"),
        size=size,
        named_size="" if size else size_in_name(get_str(spec, "storage", "storageUri")) or size_in_name(name_of(model)),
        pipeline=get_mapping(pipeline) if pipeline is not None else None,
    )


@dataclass(frozen=True)
class SupportedFormat:
    """A parsed entry of `supportedModelFormats`."""

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


def parse_supported_format(document: Document) -> SupportedFormat:
    """Parse an entry of `supportedModelFormats`."""
    auto = document.get("autoSelect")
    return SupportedFormat(
        document=document,
        architecture=get_str(document, "modelArchitecture"),
        quantization=get_str(document, "quantization"),
        format=get_str(document, "modelFormat", "name") if get_mapping(document, "modelFormat") else None,
        format_version=get_str(document, "modelFormat", "version"),
        format_operator=get_str(document, "modelFormat", "operator"),
        framework=get_str(document, "modelFramework", "name") if get_mapping(document, "modelFramework") else None,
        framework_version=get_str(document, "modelFramework", "version"),
        framework_operator=get_str(document, "modelFramework", "operator"),
        priority=get_int(document, "priority") or 1,
        weights=(_weight(document, "modelFormat"), _weight(document, "modelFramework")),
        auto_select=auto if isinstance(auto, bool) else None,
        pipeline=get_mapping(document, "diffusionPipeline") or None,
    )


def _weight(document: Document, name: str) -> int:
    weight = get_int(document, name, "weight")
    return DEFAULT_WEIGHT if weight is None else weight or _WEIGHT_OF_ZERO[name]


def match_format(model: ModelRequirements, supported: SupportedFormat, *, upstream: bool) -> tuple[Fit, str]:
    """Return how well a format matches a model, and the first mismatch."""
    reason = next(_mismatches(model, supported, upstream), "")
    if reason:
        return Fit.NONE, reason
    reason = _framework_mismatch(model, supported, upstream)
    if not reason:
        return Fit.EXACT, ""
    return (Fit.NEAR, reason) if not upstream and _same_major_version(model, supported) else (Fit.NONE, reason)


def _mismatches(model: ModelRequirements, supported: SupportedFormat, upstream: bool) -> Iterator[str]:
    if model.architecture != supported.architecture:
        yield _mismatch("architecture", model.architecture, supported.architecture)
    if model.quantization != supported.quantization:
        yield _mismatch("quantization", model.quantization, supported.quantization)
    if supported.format is None:
        yield "the runtime's entry names no model format"
    elif supported.format != model.format:
        yield f"format mismatch (model={model.format or 'none'}, runtime={supported.format})"
    else:
        reason = _version_mismatch(
            "format", model.format_version, supported.format_version, supported.format_operator, upstream
        )
        if reason:
            yield reason
    if (supported.framework or "") != model.framework:
        yield _mismatch("framework", model.framework, supported.framework or "")
    if supported.pipeline is not None:
        yield from _pipeline_mismatches(model.pipeline, supported.pipeline)


def _mismatch(name: str, model_value: str, runtime_value: str) -> str:
    if model_value and runtime_value:
        return f"{name} mismatch (model={model_value}, runtime={runtime_value})"
    if runtime_value:
        return f"the model has no {name}, and the runtime wants {runtime_value}"
    return f"the model has the {name} {model_value}, and the runtime names none"


def _version_mismatch(name: str, model_version: str, runtime_version: str, operator: str, upstream: bool) -> str:
    if model_version and runtime_version:
        if version_matches(model_version, runtime_version, operator, upstream=upstream):
            return ""
        return f"{name} version mismatch (model={model_version}, runtime={operator or 'Equal'} {runtime_version})"
    return "" if model_version == runtime_version else _mismatch(f"{name} version", model_version, runtime_version)


def _framework_mismatch(model: ModelRequirements, supported: SupportedFormat, upstream: bool) -> str:
    if not supported.framework:
        return ""
    return _version_mismatch(
        "framework", model.framework_version, supported.framework_version, supported.framework_operator, upstream
    )


def _same_major_version(model: ModelRequirements, supported: SupportedFormat) -> bool:
    """Whether the framework's major versions match. An operator other than Equal means an exact bound."""
    if supported.framework_operator not in ("", "Equal"):
        return False
    model_version, runtime_version = parse_version(model.framework_version), parse_version(supported.framework_version)
    if not model.framework_version or not supported.framework_version:
        return True
    return (
        model_version is not None
        and runtime_version is not None
        and model_version.numbers[0] == runtime_version.numbers[0]
    )


def _pipeline_mismatches(model: Document | None, supported: Document) -> Iterator[str]:
    if model is None:
        yield "the runtime wants a diffusion pipeline, and the model has none"
        return
    if get_str(supported, "className") and get_str(supported, "className") != get_str(model, "className"):
        yield _mismatch("pipeline class", get_str(model, "className"), get_str(supported, "className"))
    parts = [(name, get_mapping(supported).get(name), get_mapping(model).get(name)) for name in _PIPELINE]
    others = get_mapping(supported, "additionalComponents")
    parts += [(name, others[name], get_mapping(model, "additionalComponents").get(name)) for name in sorted(others)]
    for name, runtime_part, model_part in parts:
        if runtime_part is None:
            continue
        if model_part is None:
            yield f"the runtime wants the pipeline component {name}, and the model has none"
        for field in ("library", "type"):
            if get_str(runtime_part, field) and get_str(runtime_part, field) != get_str(model_part, field):
                yield _mismatch(f"{field} of {name}", get_str(model_part, field), get_str(runtime_part, field))


def score(model: ModelRequirements, formats: tuple[SupportedFormat, ...], *, upstream: bool, near: bool = False) -> int:
    """Return the score of a runtime: the best of the formats with auto-selection, by format and framework."""
    best = 0
    for supported in formats:
        if supported.auto_select is False:
            continue
        count = 0
        if supported.format is not None:
            # Unlike in a match, a version on one side only is no mismatch.
            if supported.format != model.format or not _versions_compatible(
                model.format_version, supported.format_version, supported.format_operator, upstream
            ):
                continue
            count += supported.weights[0]
        if supported.framework and model.framework:
            loose = _versions_compatible(
                model.framework_version, supported.framework_version, supported.framework_operator, upstream
            )
            if supported.framework != model.framework or not (
                loose or (near and _same_major_version(model, supported))
            ):
                continue
            count += supported.weights[1]
        elif supported.framework or model.framework:
            continue
        best = max(best, count * supported.priority)
    return best


def _versions_compatible(model_version: str, runtime_version: str, operator: str, upstream: bool) -> bool:
    return (
        not model_version
        or not runtime_version
        or version_matches(model_version, runtime_version, operator, upstream=upstream)
    )


def size_reason(size: str, minimum: str, maximum: str, *, upstream: bool) -> str:
    """Return why a model's size is outside a runtime's range; "" if it is inside."""
    if not size or not (minimum or maximum):
        return ""
    if upstream and not (minimum and maximum):
        return "the runtime's size range has one end only, which OME cannot compare"
    number = parse_parameters(size)
    if minimum and number < parse_parameters(minimum):
        return f"model size {size} is below the runtime's minimum, {minimum}"
    if maximum and number > parse_parameters(maximum):
        return f"model size {size} is above the runtime's maximum, {maximum}"
    return ""


def named_size_reason(size: str, minimum: str, maximum: str) -> str:
    """Return the same for a size from a model's name, which is rounded: 7B may have 7.6 billion parameters."""
    number = parse_parameters(size) if size else 0.0
    if not number:
        return ""
    if minimum and _ROUNDED * number < parse_parameters(minimum):
        return f"the model's name says {size}, below the runtime's minimum, {minimum}; if wrong, set modelParameterSize"
    if maximum and number > _ROUNDED * parse_parameters(maximum):
        return f"the model's name says {size}, above the runtime's maximum, {maximum}; if wrong, set modelParameterSize"
    return ""


def size_in_name(name: str) -> str:
    """Find the number of parameters in a name or URI: `hf://nvidia/Nemotron-Nano-9B-v2` says 9B; "" if it says none."""
    size_match = _NAMED_SIZE.search(name.rstrip("/").rpartition("/")[2])
    return size_match[0].upper() if size_match else ""


def size_distance(size: str, minimum: str, maximum: str, *, upstream: bool) -> tuple[int, float]:
    """Return the distance of a size from the bounds of a range; a missing bound is farther than any.

    In OME a runtime without a range has distance 0 and wins over those made for the size.
    """
    ends = [parse_parameters(end) for end in (minimum, maximum) if end]
    if not size:
        return 0, 0.0
    distance = sum(abs(end - parse_parameters(size)) for end in ends)
    return (0, distance) if upstream else (2 - len(ends), distance)


_ROUNDED = 1.25
_NAMED_SIZE = re.compile(r"(?<![A-Za-z0-9.])([0-9]+(\.[0-9]+)?[bB]|[0-9]{2,3}[mM])(?![A-Za-z0-9])")
"""Not the experts of `8x7B`, not the active parameters of `30B-A3B`, not the context of `7B-1M`."""
_SIZE_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6}
_QUANTITY = re.compile(r"([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?")
_UNITS = {
    **{unit: 1000.0**power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)},
    **{unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_GIGABYTE = 1024.0**3
_VERSION = re.compile(r"([vV]?)([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?(.*)", re.DOTALL)


@lru_cache(maxsize=4096)
def parse_parameters(size: str) -> float:
    """Parse a number of parameters such as `7B`; 0 if it is invalid."""
    unit = _SIZE_UNITS.get(size[-1:])
    try:
        number = float(size[:-1] if unit else size)
    except ValueError:
        return 0.0
    return number * (unit or 1.0)


def parse_quantity(value: Any) -> float | None:
    """Parse a quantity: `500m` is 0.5, `2Gi` 2147483648. None if it is invalid."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _UNITS.get(match[2] or "", 1.0) if match else None


def parse_gigabytes(value: Any, *, upstream: bool = False) -> float | None:
    """Parse memory in GB. `80` in the field `memoryGB` means 80 GB; OME reads 80 bytes."""
    number = parse_quantity(value)
    if number is None:
        return None
    bare = not (isinstance(value, str) and value.strip()[-1:].isalpha())
    return number if bare and not upstream else number / _GIGABYTE


class Version(NamedTuple):
    """A parsed version such as `v1.2.3-rc1`."""

    prefix: str
    numbers: tuple[int, ...]
    suffix: str

    @property
    def padded(self) -> tuple[int, ...]:
        """Three numbers: 1, 1.0 and 1.0.0 are the same version."""
        return (*self.numbers, 0, 0)[:3]


@lru_cache(maxsize=4096)
def parse_version(text: str) -> Version | None:
    """Parse a version; None if it is invalid."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        return None
    return Version(match[1].lower(), tuple(int(group) for group in match.groups()[1:4] if group), match[5])


def version_matches(model_version: str, runtime_version: str, operator: str, *, upstream: bool) -> bool:
    """Whether a runtime for version `runtime_version` accepts a model of version `model_version`.

    GreaterThan means that the runtime's version is greater: a maximum for models, not a minimum.
    """
    model, runtime = parse_version(model_version), parse_version(runtime_version)
    if model is None or runtime is None:
        return model_version == runtime_version and not upstream
    alike = model.prefix == runtime.prefix and len(model.numbers) == len(runtime.numbers)
    if upstream and not alike:
        return False
    if model.suffix or runtime.suffix or operator not in ("GreaterThan", "GreaterThanOrEqual"):
        return (runtime.padded, runtime.suffix) == (model.padded, model.suffix)
    if operator == "GreaterThan":
        return runtime.padded > model.padded
    return runtime.padded >= model.padded


def at_least(have: str, minimum: str, *, upstream: bool) -> bool:
    """Whether an architecture version is at least another. OME compares strings: "10.0" is below "9.0" there."""
    a, b = parse_version(have), parse_version(minimum)
    return have >= minimum if upstream or a is None or b is None else a.padded >= b.padded
