# SPDX-License-Identifier: Apache-2.0
"""The runtimes of a cluster, read once, and what each is to a model.

Called by `runtimes` through `facts.derived`. Five hundred services of twenty models ask about twenty models, so answers
are kept; they follow from the facts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.fleet.selection.matching import (
    Entry,
    Fit,
    Wanted,
    compared,
    entry,
    score,
    size_distance,
    size_reason,
    wanted,
)
from headrace.fleet.words import ClusterFacts, Document, items, kind_of, name_of, namespace_of, part, text


@dataclass(frozen=True, eq=False)
class Offer:
    """A runtime, read once."""

    runtime: Document
    name: str
    namespace: str
    """"" for one of the cluster."""
    disabled: bool
    entries: tuple[Entry, ...]
    auto_select: bool
    least: str
    most: str
    classes: tuple[str, ...]
    engine: bool
    """Whether it says how to run an engine; so with the others."""
    worker: bool
    decoder: bool
    decoder_worker: bool
    router: bool


@dataclass(frozen=True)
class Answer:
    """What a runtime is to a model."""

    fit: Fit
    reason: str
    score: int
    distance: tuple[int, float]
    entry: Document | None


class Rejection(NamedTuple):
    """A runtime that was not chosen."""

    name: str
    reason: str


class Match(NamedTuple):
    """A runtime that can serve a model."""

    offer: Offer
    answer: Answer

    @property
    def rank(self) -> tuple[int, tuple[int, float], str]:
        """Among runtimes of one fit and one scope: score, then size, then name."""
        return -self.answer.score, self.answer.distance, self.offer.name


class Standing(NamedTuple):
    """What the runtimes in reach of a namespace are to a model, whatever the service."""

    fitting: tuple[Match, ...]
    """Best first."""
    others: tuple[Rejection, ...]


@dataclass(frozen=True, eq=False)
class RuntimeIndex:
    """All runtimes by namespace, and the answers given so far."""

    upstream: bool
    offers: dict[str, tuple[Offer, ...]]
    answers: dict[int, tuple[Document, Wanted, dict[int, Answer]]] = field(default_factory=dict)
    """By model and runtime, both by identity: the models are kept alive here, the runtimes above."""
    standings: dict[tuple[str, int], Standing] = field(default_factory=dict)
    """By namespace and model, kept alive by their answers."""

    def reachable(self, namespace: str) -> tuple[Offer, ...]:
        """The runtimes of the namespace, then those of the cluster."""
        return (*self.offers.get(namespace, ()), *self.offers.get("", ()))

    def standing(self, namespace: str, model: Document) -> Standing:
        """The runtimes in reach, told apart by whether they can serve a model."""
        found = self.standings.get((namespace, id(model)))
        if found is None:
            found = self.standings[namespace, id(model)] = self._standing(namespace, model)
        return found

    def _standing(self, namespace: str, model: Document) -> Standing:
        fitting: list[Match] = []
        others: list[Rejection] = []
        for offer in self.reachable(namespace):
            answer = self.answer(model, offer)
            if answer.fit is Fit.NONE:
                others.append(Rejection(offer.name, answer.reason))
            else:
                fitting.append(Match(offer, answer))
        # Best first. Near fits come last of all, so that they serve only models that OME finds no runtime for.
        fitting.sort(key=lambda each: (each.answer.fit, not each.offer.namespace, each.rank))
        return Standing(tuple(fitting), tuple(others))

    def answer(self, model: Document, offer: Offer) -> Answer:
        """Whether a runtime can serve a model, and how well it is made for it."""
        kept = self.answers.get(id(model))
        if kept is None:
            kept = self.answers[id(model)] = (model, wanted(model), {})
        found = kept[2].get(id(offer))
        if found is None:
            found = kept[2][id(offer)] = _answer(kept[1], offer, self.upstream)
        return found


def runtime_index(facts: ClusterFacts) -> RuntimeIndex:
    """The index of these facts; for `facts.derived`."""
    offers: dict[str, list[Offer]] = {}
    for runtime in facts.runtimes:
        made = offer_of(runtime)
        offers.setdefault(made.namespace, []).append(made)
    ordered = {namespace: tuple(sorted(each, key=lambda offer: offer.name)) for namespace, each in offers.items()}
    return RuntimeIndex(facts.settings.upstream_selection, ordered)


def offer_of(runtime: Document) -> Offer:
    """A runtime as selection sees it."""
    spec = part(runtime, "spec")
    entries = tuple(entry(part(each)) for each in items(spec, "supportedModelFormats"))
    engine, decoder = part(spec, "engineConfig"), part(spec, "decoderConfig")
    classes = items(spec, "acceleratorRequirements", "acceleratorClasses")
    return Offer(
        runtime=runtime,
        name=name_of(runtime),
        namespace="" if kind_of(runtime) == "ClusterServingRuntime" else namespace_of(runtime),
        disabled=spec.get("disabled") is True,
        entries=entries,
        auto_select=any(each.auto_select for each in entries),
        least=text(spec, "modelSizeRange", "min"),
        most=text(spec, "modelSizeRange", "max"),
        classes=tuple(each for each in classes if isinstance(each, str)),
        engine=bool(engine) or bool(items(spec, "containers")),
        worker=bool(part(engine, "worker")) or bool(part(spec, "workers")),
        decoder=bool(decoder),
        decoder_worker=bool(part(decoder, "worker")),
        router=bool(part(spec, "routerConfig")),
    )


def answer_of(model: Document, offer: Offer, *, upstream: bool) -> Answer:
    """What a runtime is to a model, worked out."""
    return _answer(wanted(model), offer, upstream)


def _answer(model: Wanted, offer: Offer, upstream: bool) -> Answer:
    if offer.disabled:
        return Answer(Fit.NONE, "the runtime is disabled", 0, (0, 0.0), None)
    best, said, matched = Fit.NONE, "the runtime lists no supported model formats", None
    for number, each in enumerate(offer.entries):
        fit, reason = compared(model, each, upstream=upstream)
        if fit < best or number == 0:
            best, said = fit, reason
            matched = each.document if fit < Fit.NONE else None
        if best is Fit.EXACT:
            break
    if best < Fit.NONE:
        reason = size_reason(model.size, offer.least, offer.most, upstream=upstream)
        if reason:
            best, said, matched = Fit.NONE, reason, None
    if best is Fit.NONE:
        return Answer(Fit.NONE, said, 0, (0, 0.0), None)
    return Answer(
        fit=best,
        reason=said,
        score=score(model, offer.entries, upstream=upstream, near=best is Fit.NEAR),
        distance=size_distance(model.size, offer.least, offer.most, upstream=upstream),
        entry=matched,
    )
