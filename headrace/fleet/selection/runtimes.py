# SPDX-License-Identifier: Apache-2.0
"""Select the runtime of a service: the one it names, else the best of those that can serve its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.fleet.names import ACCELERATOR_CLASS, DEPLOYMENT_MODE, VIRTUAL
from headrace.fleet.selection.model_match import (
    Fit,
    ModelRequirements,
    SupportedFormat,
    match_format,
    named_size_reason,
    parse_supported_format,
    requirements_of,
    score,
    size_distance,
    size_reason,
)
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

_MAX_REASONS = 5
"""Number of runtimes that a problem's message explains; `rejected` has all."""


@dataclass(frozen=True)
class Selection:
    """The selected runtime of a service, the reason, and the rejected runtimes."""

    runtime: Document | None
    reason: str
    rejected: tuple[Rejection, ...] = ()
    problem: Problem | None = None
    """Why there is none, or why the named one cannot be used."""
    failure: str = ""
    """The problem as a FailureReason of the status: NoSupportingRuntime, RuntimeDisabled, ..."""


def select(service: Document, facts: ClusterFacts) -> Selection:
    """Select the runtime of a service. Without a problem and without a runtime, the service has its own images."""
    spec, namespace = get_mapping(service, "spec"), namespace_of(service)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return Selection(None, f"a {VIRTUAL} runs nothing")
    model_name = get_str(spec, "model", "name")
    model = facts.model(namespace, model_name, get_str(spec, "model", "kind")) if model_name else None
    if model_name and model is None:
        problem = Problem("spec.model.name", f"there is no model {model_name}", "create it first, or correct the name")
        return Selection(None, "the model does not exist", problem=problem, failure="BaseModelNotFound")
    runtime_name = get_str(spec, "runtime", "name")
    if runtime_name:
        return _select_named(service, runtime_name, model, facts)
    alone = has_own_image(get_mapping(spec, "engine"))
    if model is None:
        if alone:
            return Selection(None, "the engine names its own image")
        problem = Problem("spec.model", "is missing, so no runtime can be chosen", "add spec.model or spec.runtime")
        return Selection(None, "no model is named", problem=problem, failure="InvalidPredictorSpec")
    return _select_best(service, model, facts, alone)


def has_own_image(engine: Document) -> bool:
    """Whether an engine has its own images and needs no runtime."""
    if get_str(engine, "runner", "image"):
        return True
    return bool(get_str(engine, "leader", "runner", "image") and get_str(engine, "worker", "runner", "image"))


def matching_entry(runtime: Document, model: Document, facts: ClusterFacts) -> Document | None:
    """Return the entry of `supportedModelFormats` that matches a model; it configures accelerators."""
    index = facts.derived(runtime_index)
    namespace = namespace_of(runtime) if get_str(runtime, "kind") != "ClusterServingRuntime" else ""
    parsed = next((parsed for parsed in index.runtimes.get(namespace, ()) if parsed.document is runtime), None)
    if parsed is None:
        return match_runtime(model, parse_runtime(runtime), upstream=index.upstream).entry
    return index.match(model, parsed).entry


def _select_named(service: Document, name: str, model: Document | None, facts: ClusterFacts) -> Selection:
    namespace = namespace_of(service)
    runtime = facts.runtime(namespace, name, get_str(service, "spec", "runtime", "kind"))
    index = facts.derived(runtime_index)
    others = tuple(
        Rejection(parsed.name, f"the service names {name}")
        for parsed in index.available(namespace)
        if parsed.document is not runtime
    )
    place = "spec.runtime.name"
    if runtime is None:
        fix = "create it first, correct the name, or leave spec.runtime out to have one chosen"
        problem = Problem(place, f"there is no runtime {name}", fix)
        return Selection(None, "the runtime does not exist", others, problem, "RuntimeNotRecognized")
    parsed = next(parsed for parsed in index.available(namespace) if parsed.document is runtime)
    reason, failure = "", "NoSupportingRuntime"
    if parsed.disabled:
        reason, failure = "it is disabled", "RuntimeDisabled"
    else:
        reason = _accelerator_mismatch(_requested_classes(service), parsed)
        if not reason and model is not None:
            result = index.match(model, parsed)
            reason = result.reason if result.fit is Fit.NONE else ""
    message = f"the service names {name}"
    if not reason:
        lacks = "" if index.upstream else _missing_config(_needs(get_mapping(service, "spec")), parsed)
        return Selection(runtime, f"{message}, though {lacks}" if lacks else message, others)
    unread = _unread_problem(model) if model is not None and failure == "NoSupportingRuntime" else None
    if unread is not None:
        return Selection(
            None, f"{message}, and the model's files are not there yet", others, unread, "BaseModelNotReady"
        )
    subject = f"the runtime {name} cannot serve {name_of(model)}" if model is not None else f"the runtime {name}"
    fix = "name another, or leave spec.runtime out to have one chosen"
    problem = Problem(place, f"{subject}: {reason}", fix)
    return Selection(None, f"{message}, which cannot be used: {reason}", others, problem, failure)


def _select_best(service: Document, model: Document, facts: ClusterFacts, alone: bool) -> Selection:
    index = facts.derived(runtime_index)
    candidates = index.candidates(namespace_of(service), model)
    classes, needs = _requested_classes(service), _needs(get_mapping(service, "spec"))
    named_size = requirements_of(model).named_size
    matches: list[Match] = []
    rejected: list[Rejection] = []
    for match in candidates.fitting:
        reason = _accelerator_mismatch(classes, match.runtime)
        if not reason and not match.runtime.auto_select:
            reason = "it fits, but none of its formats has autoSelect: true"
        if not reason and not index.upstream:
            reason = _missing_config(needs, match.runtime) or named_size_reason(
                named_size, match.runtime.min_size, match.runtime.max_size
            )
        if reason:
            rejected.append(Rejection(match.runtime.name, reason))
        else:
            matches.append(match)
    if not matches:
        return _no_match(model, (*rejected, *candidates.others), alone)
    best = matches[0]
    lower = [Rejection(match.runtime.name, _ranked_lower_reason(match, best)) for match in matches[1:]]
    return Selection(best.runtime.document, _reason(best, len(matches)), (*lower, *rejected, *candidates.others))


def _no_match(model: Document, rejected: tuple[Rejection, ...], alone: bool) -> Selection:
    if alone:
        return Selection(None, "the engine names its own image, and no runtime fits the model", rejected)
    unread = _unread_problem(model)
    if unread is not None:
        return Selection(None, "the model's files are not there yet", rejected, unread, "BaseModelNotReady")
    reasons = "; ".join(f"{rejection.name}: {rejection.reason}" for rejection in rejected[:_MAX_REASONS])
    more = len(rejected) - _MAX_REASONS
    if more > 0:
        reasons += f"; and {more} more"
    message = f"no runtime fits the model {name_of(model)} ({reasons or 'there are none'})"
    fix = "name one in spec.runtime, or create one that supports the model's format with autoSelect: true"
    return Selection(None, "no runtime fits", rejected, Problem("spec.model.name", message, fix), "NoSupportingRuntime")


def _unread_problem(model: Document) -> Problem | None:
    """Return the problem of a model whose metadata has not been read from its files yet; None for any other."""
    state = get_str(model, "status", "state")
    if get_str(model, "spec", "modelArchitecture") or state not in ("Failed", "In_Transit"):
        return None
    name = name_of(model)
    if state == "Failed":
        message = get_str(model, "status", "message")
        where_failed = f" on {message}" if message else ""
        fix = f"correct its spec.storage, or what is named there: headrace describe model {name} shows the nodes"
        return Problem("spec.model.name", f"the download of the model {name} failed{where_failed}", fix)
    fix = "wait for it, or write modelArchitecture and modelFormat in the model's spec"
    return Problem("spec.model.name", f"the model {name} is being downloaded, and nothing is known of it before", fix)


def _reason(match: Match, count: int) -> str:
    result = match.result
    remark = f", though not exactly ({result.reason})" if result.fit is Fit.NEAR else ""
    if result.unknown_size:
        remark += (
            f", whose size is not known and was not compared with {result.unknown_size}: set its modelParameterSize"
        )
    if count == 1:
        return f"it alone fits the model{remark}"
    return f"it is the best of {count} that fit the model{remark} (score {result.score})"


def _ranked_lower_reason(match: Match, best: Match) -> str:
    name = best.runtime.name
    if match.result.fit != best.result.fit:
        return f"it fits, but {name} fits exactly ({match.result.reason})"
    if bool(match.runtime.namespace) != bool(best.runtime.namespace):
        return f"it fits, but {name} is of the service's namespace"
    if match.result.score != best.result.score:
        return f"it fits, but {name} scores higher ({best.result.score} against {match.result.score})"
    if match.result.distance != best.result.distance:
        return f"it fits, but the size range of {name} is closer to the model"
    return f"it fits as well as {name}, which is first by name"


def _requested_classes(service: Document) -> tuple[str, ...]:
    """Return the accelerator classes that a service names."""
    spec = get_mapping(service, "spec")
    names = {
        annotations_of(service).get(ACCELERATOR_CLASS, ""),
        get_str(spec, "acceleratorSelector", "acceleratorClass"),
        get_str(spec, "engine", "acceleratorOverride", "acceleratorClass"),
        get_str(spec, "decoder", "acceleratorOverride", "acceleratorClass"),
    }
    return tuple(sorted(names - {""}))


def _accelerator_mismatch(classes: tuple[str, ...], parsed: ParsedRuntime) -> str:
    missing = [name for name in classes if name not in parsed.classes]
    if not missing:
        return ""
    have = ", ".join(parsed.classes) or "none"
    return f"accelerator mismatch (service={', '.join(missing)}, runtime={have})"


class _RuntimeNeeds(NamedTuple):
    """The component configurations that a service needs from a runtime."""

    engine: bool
    worker: bool
    has_decoder: bool
    decoder: bool
    decoder_worker: bool
    router: bool


def _needs(spec: Document) -> _RuntimeNeeds:
    engine, decoder = get_mapping(spec, "engine"), get_mapping(spec, "decoder")
    return _RuntimeNeeds(
        engine=not has_own_image(engine),
        worker=_has_workers(engine) and not get_str(engine, "worker", "runner", "image"),
        has_decoder="decoder" in spec,
        decoder="decoder" in spec and not has_own_image(decoder),
        decoder_worker=_has_workers(decoder) and not get_str(decoder, "worker", "runner", "image"),
        router="router" in spec and not get_str(spec, "router", "runner", "image"),
    )


def _has_workers(component: Document) -> bool:
    return (get_int(component, "worker", "size") or 0) > 0


def _missing_config(needs: _RuntimeNeeds, parsed: ParsedRuntime) -> str:
    """Return what a runtime lacks for the components of a service; "" if nothing. OME does not check this."""
    if needs.engine and not parsed.engine:
        return "the runtime has no engineConfig"
    if parsed.decoder and not needs.has_decoder:
        return "the runtime separates prefill from decoding, and the service has no decoder"
    if needs.decoder and not parsed.decoder:
        return "the service has a decoder, and the runtime no decoderConfig"
    if needs.worker and not parsed.worker:
        return "the engine asks for workers, and the runtime's engineConfig has none"
    if needs.decoder_worker and not parsed.decoder_worker:
        return "the decoder asks for workers, and the runtime's decoderConfig has none"
    if needs.router and not parsed.router:
        return "the service has a router, and the runtime no routerConfig"
    return ""


@dataclass(frozen=True, eq=False)
class ParsedRuntime:
    """The fields of a runtime that selection reads."""

    document: Document
    name: str
    namespace: str
    """"" for a ClusterServingRuntime."""
    disabled: bool
    entries: tuple[SupportedFormat, ...]
    auto_select: bool
    min_size: str
    max_size: str
    classes: tuple[str, ...]
    engine: bool
    """Whether it configures an engine; the same for the other components."""
    worker: bool
    decoder: bool
    decoder_worker: bool
    router: bool


@dataclass(frozen=True)
class MatchResult:
    """How well a runtime matches a model."""

    fit: Fit
    reason: str
    score: int
    distance: tuple[int, float]
    entry: Document | None
    unknown_size: str = ""
    """The runtime's range of sizes, if the model does not say its size."""


class Rejection(NamedTuple):
    """A runtime that was not selected."""

    name: str
    reason: str


class Match(NamedTuple):
    """A runtime that can serve a model."""

    runtime: ParsedRuntime
    result: MatchResult

    @property
    def rank(self) -> tuple[int, tuple[int, float], str]:
        """Order of runtimes with the same fit and scope: score, then size, then name."""
        return -self.result.score, self.result.distance, self.runtime.name


class Candidates(NamedTuple):
    """The runtimes available in a namespace, matched with a model."""

    fitting: tuple[Match, ...]
    """Best first."""
    others: tuple[Rejection, ...]


@dataclass(frozen=True, eq=False)
class RuntimeIndex:
    """All runtimes by namespace, with a cache of matches."""

    upstream: bool
    runtimes: dict[str, tuple[ParsedRuntime, ...]]
    results: dict[int, tuple[Document, ModelRequirements, dict[int, MatchResult]]] = field(default_factory=dict)
    """By model and runtime, both by identity; the references keep them alive."""
    candidate_cache: dict[tuple[str, int], Candidates] = field(default_factory=dict)
    """By namespace and model."""

    def available(self, namespace: str) -> tuple[ParsedRuntime, ...]:
        """Return the runtimes of a namespace, then the cluster-wide ones."""
        return (*self.runtimes.get(namespace, ()), *self.runtimes.get("", ()))

    def candidates(self, namespace: str, model: Document) -> Candidates:
        """Return the available runtimes, split by whether they can serve a model."""
        cached = self.candidate_cache.get((namespace, id(model)))
        if cached is None:
            cached = self.candidate_cache[namespace, id(model)] = self._find_candidates(namespace, model)
        return cached

    def _find_candidates(self, namespace: str, model: Document) -> Candidates:
        fitting: list[Match] = []
        others: list[Rejection] = []
        for parsed in self.available(namespace):
            result = self.match(model, parsed)
            if result.fit is Fit.NONE:
                others.append(Rejection(parsed.name, result.reason))
            else:
                fitting.append(Match(parsed, result))
        # Best first. Near matches come last: they only serve models for which OME finds no runtime.
        fitting.sort(key=lambda match: (match.result.fit, not match.runtime.namespace, match.rank))
        return Candidates(tuple(fitting), tuple(others))

    def match(self, model: Document, parsed: ParsedRuntime) -> MatchResult:
        """Return how well a runtime matches a model."""
        cached = self.results.get(id(model))
        if cached is None:
            cached = self.results[id(model)] = (model, requirements_of(model), {})
        result = cached[2].get(id(parsed))
        if result is None:
            result = cached[2][id(parsed)] = _match(cached[1], parsed, self.upstream)
        return result


def runtime_index(facts: ClusterFacts) -> RuntimeIndex:
    """Build the index of the facts; for `facts.derived`."""
    runtimes: dict[str, list[ParsedRuntime]] = {}
    for runtime in facts.runtimes:
        parsed = parse_runtime(runtime)
        runtimes.setdefault(parsed.namespace, []).append(parsed)
    ordered = {namespace: tuple(sorted(item, key=lambda parsed: parsed.name)) for namespace, item in runtimes.items()}
    return RuntimeIndex(facts.settings.upstream_selection, ordered)


def parse_runtime(runtime: Document) -> ParsedRuntime:
    """Parse a runtime."""
    spec = get_mapping(runtime, "spec")
    entries = tuple(
        parse_supported_format(get_mapping(model_format)) for model_format in get_list(spec, "supportedModelFormats")
    )
    engine, decoder = get_mapping(spec, "engineConfig"), get_mapping(spec, "decoderConfig")
    classes = get_list(spec, "acceleratorRequirements", "acceleratorClasses")
    return ParsedRuntime(
        document=runtime,
        name=name_of(runtime),
        namespace="" if kind_of(runtime) == "ClusterServingRuntime" else namespace_of(runtime),
        disabled=spec.get("disabled") is True,
        entries=entries,
        auto_select=any(entry.auto_select for entry in entries),
        min_size=get_str(spec, "modelSizeRange", "min"),
        max_size=get_str(spec, "modelSizeRange", "max"),
        classes=tuple(name for name in classes if isinstance(name, str)),
        engine=bool(engine) or bool(get_list(spec, "containers")),
        worker=bool(get_mapping(engine, "worker")) or bool(get_mapping(spec, "workers")),
        decoder=bool(decoder),
        decoder_worker=bool(get_mapping(decoder, "worker")),
        router=bool(get_mapping(spec, "routerConfig")),
    )


def match_runtime(model: Document, parsed: ParsedRuntime, *, upstream: bool) -> MatchResult:
    """Match a runtime with a model, without a cache."""
    return _match(requirements_of(model), parsed, upstream)


def _match(model: ModelRequirements, parsed: ParsedRuntime, upstream: bool) -> MatchResult:
    if parsed.disabled:
        return MatchResult(Fit.NONE, "the runtime is disabled", 0, (0, 0.0), None)
    best, value, matched = Fit.NONE, "the runtime lists no supported model formats", None
    for number, entry in enumerate(parsed.entries):
        fit, reason = match_format(model, entry, upstream=upstream)
        if fit < best or number == 0:
            best, value = fit, reason
            matched = entry.document if fit < Fit.NONE else None
        if best is Fit.EXACT:
            break
    if best < Fit.NONE:
        reason = size_reason(model.size, parsed.min_size, parsed.max_size, upstream=upstream)
        if reason:
            best, value, matched = Fit.NONE, reason, None
    if best is Fit.NONE:
        return MatchResult(Fit.NONE, value, 0, (0, 0.0), None)
    return MatchResult(
        fit=best,
        reason=value,
        score=score(model, parsed.entries, upstream=upstream, near=best is Fit.NEAR),
        distance=size_distance(
            model.size or ("" if upstream else model.named_size), parsed.min_size, parsed.max_size, upstream=upstream
        ),
        entry=matched,
        unknown_size="" if model.size or model.named_size else _size_range(parsed),
    )


def _size_range(parsed: ParsedRuntime) -> str:
    minimum, maximum = (
        parsed.min_size and f"at least {parsed.min_size}",
        parsed.max_size and f"at most {parsed.max_size}",
    )
    return " and ".join(filter(None, (minimum, maximum)))
