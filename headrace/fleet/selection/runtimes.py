# SPDX-License-Identifier: Apache-2.0
"""The runtime of a service: the one it names, else the best of those that fit its model.

Called by planning, explaining and the admission webhook with a service whose defaults are in. With
`FleetSettings.upstream_selection` it chooses as OME does; without, a runtime made for the model's size comes before one
that names no size, and one whose components are not the service's is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.fleet.names import ACCELERATOR_CLASS, DEPLOYMENT_MODE, VIRTUAL
from headrace.fleet.selection.index import Match, Offer, Rejection, answer_of, offer_of, runtime_index
from headrace.fleet.selection.matching import Fit
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    Problem,
    annotations_of,
    name_of,
    namespace_of,
    part,
    text,
    whole,
)

_NAMED_REASONS = 5
"""How many runtimes a problem explains; `rejected` has them all."""


@dataclass(frozen=True)
class Selection:
    """The runtime of a service, why it is that one, and why the others are not."""

    runtime: Document | None
    reason: str
    rejected: tuple[Rejection, ...] = ()
    problem: Problem | None = None
    """Why there is none, or why the named one cannot be taken."""
    failure: str = ""
    """The problem as a FailureReason of the status: NoSupportingRuntime, RuntimeDisabled, ..."""


def select(service: Document, facts: ClusterFacts) -> Selection:
    """The runtime for a service. Without a problem and without a runtime, the service runs images of its own."""
    spec, namespace = part(service, "spec"), namespace_of(service)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return Selection(None, f"a {VIRTUAL} runs nothing")
    model_name = text(spec, "model", "name")
    model = facts.model(namespace, model_name, text(spec, "model", "kind")) if model_name else None
    if model_name and model is None:
        problem = Problem("spec.model.name", f"there is no model {model_name}", "create it first, or correct the name")
        return Selection(None, "the model is not there", problem=problem, failure="BaseModelNotFound")
    named = text(spec, "runtime", "name")
    if named:
        return _named(service, named, model, facts)
    alone = runs_alone(part(spec, "engine"))
    if model is None:
        if alone:
            return Selection(None, "the engine names its own image")
        problem = Problem("spec.model", "is missing, so no runtime can be chosen", "add spec.model or spec.runtime")
        return Selection(None, "no model is named", problem=problem, failure="InvalidPredictorSpec")
    return _chosen(service, model, facts, alone)


def runs_alone(engine: Document) -> bool:
    """Whether an engine says which images to run, so that it needs no runtime."""
    if text(engine, "runner", "image"):
        return True
    return bool(text(engine, "leader", "runner", "image") and text(engine, "worker", "runner", "image"))


def matching_entry(runtime: Document, model: Document, facts: ClusterFacts) -> Document | None:
    """The entry of `supportedModelFormats` by which a runtime serves a model: accelerators are configured there."""
    index = facts.derived(runtime_index)
    namespace = namespace_of(runtime) if text(runtime, "kind") != "ClusterServingRuntime" else ""
    offer = next((each for each in index.offers.get(namespace, ()) if each.runtime is runtime), None)
    if offer is None:
        return answer_of(model, offer_of(runtime), upstream=index.upstream).entry
    return index.answer(model, offer).entry


def _named(service: Document, name: str, model: Document | None, facts: ClusterFacts) -> Selection:
    namespace = namespace_of(service)
    runtime = facts.runtime(namespace, name, text(service, "spec", "runtime", "kind"))
    index = facts.derived(runtime_index)
    others = tuple(
        Rejection(each.name, f"the service names {name}")
        for each in index.reachable(namespace)
        if each.runtime is not runtime
    )
    place = "spec.runtime.name"
    if runtime is None:
        fix = "create it first, correct the name, or leave spec.runtime out to have one chosen"
        problem = Problem(place, f"there is no runtime {name}", fix)
        return Selection(None, "the runtime is not there", others, problem, "RuntimeNotRecognized")
    offer = next(each for each in index.reachable(namespace) if each.runtime is runtime)
    reason, failure = "", "NoSupportingRuntime"
    if offer.disabled:
        reason, failure = "it is disabled", "RuntimeDisabled"
    else:
        reason = _accelerators(_classes(service), offer)
        if not reason and model is not None:
            answer = index.answer(model, offer)
            reason = answer.reason if answer.fit is Fit.NONE else ""
    said = f"the service names {name}"
    if not reason:
        lacks = "" if index.upstream else _lacks(_needs(part(service, "spec")), offer)
        return Selection(runtime, f"{said}, though {lacks}" if lacks else said, others)
    subject = f"the runtime {name} cannot serve {name_of(model)}" if model is not None else f"the runtime {name}"
    fix = "name another, or leave spec.runtime out to have one chosen"
    problem = Problem(place, f"{subject}: {reason}", fix)
    return Selection(None, f"{said}, which cannot be taken: {reason}", others, problem, failure)


def _chosen(service: Document, model: Document, facts: ClusterFacts, alone: bool) -> Selection:
    index = facts.derived(runtime_index)
    standing = index.standing(namespace_of(service), model)
    classes, needs = _classes(service), _needs(part(service, "spec"))
    matches: list[Match] = []
    rejected: list[Rejection] = []
    for match in standing.fitting:
        reason = _accelerators(classes, match.offer)
        if not reason and not match.offer.auto_select:
            reason = "it fits, but none of its formats has autoSelect: true"
        if not reason and not index.upstream:
            reason = _lacks(needs, match.offer)
        if reason:
            rejected.append(Rejection(match.offer.name, reason))
        else:
            matches.append(match)
    if not matches:
        return _none(model, (*rejected, *standing.others), alone)
    best = matches[0]
    behind = [Rejection(each.offer.name, _behind(each, best)) for each in matches[1:]]
    return Selection(best.offer.runtime, _because(best, len(matches)), (*behind, *rejected, *standing.others))


def _none(model: Document, rejected: tuple[Rejection, ...], alone: bool) -> Selection:
    if alone:
        return Selection(None, "the engine names its own image, and no runtime fits the model", rejected)
    told = "; ".join(f"{each.name}: {each.reason}" for each in rejected[:_NAMED_REASONS])
    more = len(rejected) - _NAMED_REASONS
    if more > 0:
        told += f"; and {more} more"
    said = f"no runtime fits the model {name_of(model)} ({told or 'there are none'})"
    fix = "name one in spec.runtime, or create one that supports the model's format with autoSelect: true"
    return Selection(None, "no runtime fits", rejected, Problem("spec.model.name", said, fix), "NoSupportingRuntime")


def _because(match: Match, count: int) -> str:
    answer = match.answer
    near = f", though not exactly ({answer.reason})" if answer.fit is Fit.NEAR else ""
    if count == 1:
        return f"it alone fits the model{near}"
    return f"it is the best of {count} that fit the model{near} (score {answer.score})"


def _behind(match: Match, best: Match) -> str:
    name = best.offer.name
    if match.answer.fit != best.answer.fit:
        return f"it fits, but {name} fits exactly ({match.answer.reason})"
    if bool(match.offer.namespace) != bool(best.offer.namespace):
        return f"it fits, but {name} is of the service's namespace"
    if match.answer.score != best.answer.score:
        return f"it fits, but {name} scores higher ({best.answer.score} against {match.answer.score})"
    if match.answer.distance != best.answer.distance:
        return f"it fits, but the size range of {name} is closer to the model"
    return f"it fits as well as {name}, which is first by name"


def _classes(service: Document) -> tuple[str, ...]:
    """The accelerator classes that a service asks for by name."""
    spec = part(service, "spec")
    named = {
        annotations_of(service).get(ACCELERATOR_CLASS, ""),
        text(spec, "acceleratorSelector", "acceleratorClass"),
        text(spec, "engine", "acceleratorOverride", "acceleratorClass"),
        text(spec, "decoder", "acceleratorOverride", "acceleratorClass"),
    }
    return tuple(sorted(named - {""}))


def _accelerators(classes: tuple[str, ...], offer: Offer) -> str:
    missing = [each for each in classes if each not in offer.classes]
    if not missing:
        return ""
    have = ", ".join(offer.classes) or "none"
    return f"accelerator mismatch (service={', '.join(missing)}, runtime={have})"


class _Needs(NamedTuple):
    """What the components of a service need of a runtime."""

    engine: bool
    worker: bool
    has_decoder: bool
    decoder: bool
    decoder_worker: bool
    router: bool


def _needs(spec: Document) -> _Needs:
    engine, decoder = part(spec, "engine"), part(spec, "decoder")
    return _Needs(
        engine=not runs_alone(engine),
        worker=_grouped(engine) and not text(engine, "worker", "runner", "image"),
        has_decoder="decoder" in spec,
        decoder="decoder" in spec and not runs_alone(decoder),
        decoder_worker=_grouped(decoder) and not text(decoder, "worker", "runner", "image"),
        router="router" in spec and not text(spec, "router", "runner", "image"),
    )


def _grouped(component: Document) -> bool:
    return (whole(component, "worker", "size") or 0) > 0


def _lacks(needs: _Needs, offer: Offer) -> str:
    """Why a runtime has not what the components of a service need; "" if it has. OME asks nothing of the kind."""
    if needs.engine and not offer.engine:
        return "the runtime has no engineConfig"
    if offer.decoder and not needs.has_decoder:
        return "the runtime separates prefill from decoding, and the service has no decoder"
    if needs.decoder and not offer.decoder:
        return "the service has a decoder, and the runtime no decoderConfig"
    if needs.worker and not offer.worker:
        return "the engine asks for workers, and the runtime's engineConfig has none"
    if needs.decoder_worker and not offer.decoder_worker:
        return "the decoder asks for workers, and the runtime's decoderConfig has none"
    if needs.router and not offer.router:
        return "the service has a router, and the runtime no routerConfig"
    return ""
