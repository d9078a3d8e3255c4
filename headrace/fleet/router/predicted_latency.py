# SPDX-License-Identifier: Apache-2.0
"""The policy `predicted_latency`: choose the backend expected to meet a request's latency target, or to finish first.

Two small models per backend are learned from observed requests: the time to first token and the time per further token, both
from the prompt tokens that the backend still has to compute and the streams that it generates. A request
may name its targets (`x-slo-ttft-ms`, `x-slo-tpot-ms`), and `x-slo-refuse`, to be refused if no backend is expected to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.prefix_tree import PrefixTree
from headrace.fleet.router.proxied_request import ProxiedRequest, RequestStrategy

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import PredictedLatencySettings, RouterSettings
    from headrace.net.http.heads import Buffer

TTFT_HEADER, TPOT_HEADER, REFUSE_HEADER = b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-slo-refuse"
_CHARACTERS_PER_TOKEN = 4
_TOKENS_SCALE, _STREAMS_SCALE = 1000.0, 10.0
"""Units of the features, so that all are of the same order of magnitude."""
_FORGETTING = 0.995
"""Forgetting factor: about the last 200 samples count."""
_MAX_UNCERTAINTY = 1e4
_MAX_SAMPLES, _COMMON_SAMPLES = 200, 30
"""Weight of the common model of all backends, as a number of samples."""
_HALF_LIFE_SECONDS = 10.0
"""Time after which a backend's own samples count half: it may have recovered."""
_MIN_SAMPLES = 8
"""Number of samples before the error of predictions is measured."""
_MAX_COMPARED = 16
"""Maximum number of backends that are compared for one request."""
_CLEARLY_SOONER = 0.95
_WORK_WEIGHT = 5.0
"""How often the time to compute a prompt counts beside the request's own latency: other requests of the backend wait for it.

With 0, prompts are computed again on idle backends, and the fleet is full sooner (`bench/fleet_sim.py`)."""
_LEAST_EVENTS = 4
"""Events of a stream from which on the time between them is learned."""
_END_OF_EVENT = b"\n\n"
_DEFAULT_OUTPUT = 100.0


Features = tuple[float, float, float]
"""Features: the constant 1, prompt tokens to compute, and streams, in the units above."""


class LatencyModel:
    """A linear model of a time, learned online: recursive least squares that forgets."""

    __slots__ = ("_uncertainty", "_weights", "error", "last", "samples")

    def __init__(self) -> None:
        self._weights = (0.0, 0.0, 0.0)
        self._uncertainty = (100.0, 0.0, 0.0, 100.0, 0.0, 100.0)
        """The upper triangle of the inverse of the features' correlations, which is symmetric."""
        self.samples = 0
        self.last = 0.0
        """Time of the last sample."""
        self.error = 0.0
        """Mean relative error of recent predictions."""

    def predict(self, features: Features) -> float:
        """Return the expected seconds."""
        (w0, w1, w2), (f0, f1, f2) = self._weights, features
        return max(w0 * f0 + w1 * f1 + w2 * f2, 0.0)

    def learn(self, features: Features, seconds: float, now: float) -> None:
        """Update the model with a sample."""
        (w0, w1, w2), (f0, f1, f2) = self._weights, features
        expected = w0 * f0 + w1 * f1 + w2 * f2
        if self.samples >= _MIN_SAMPLES:
            self.error += 0.05 * (min(abs(seconds - expected) / max(seconds, 1e-6), 10.0) - self.error)
            # An outlier must not spoil the model.
            seconds = min(seconds, 10 * max(expected, 0.0) + 1.0)
        self.samples += 1
        self.last = now
        # Unrolled: loops over three features take five times as long.
        a, b, c, d, e, f = self._uncertainty
        p0, p1, p2 = a * f0 + b * f1 + c * f2, b * f0 + d * f1 + e * f2, c * f0 + e * f1 + f * f2
        scale = _FORGETTING + p0 * f0 + p1 * f1 + p2 * f2
        step = (seconds - expected) / scale
        self._weights = (w0 + p0 * step, w1 + p1 * step, w2 + p2 * step)
        # Without new information, forgetting would let the uncertainty grow for ever.
        grow = 1 / _FORGETTING if a + d + f < _MAX_UNCERTAINTY else 1.0
        q0, q1, q2 = p0 / scale, p1 / scale, p2 / scale
        self._uncertainty = (
            (a - p0 * q0) * grow,
            (b - p0 * q1) * grow,
            (c - p0 * q2) * grow,
            (d - p1 * q1) * grow,
            (e - p1 * q2) * grow,
            (f - p2 * q2) * grow,
        )


class BackendLatency:
    """The models and the load of one backend."""

    __slots__ = ("first_token", "next_token", "pending_tokens", "streams")

    def __init__(self) -> None:
        self.first_token = LatencyModel()
        self.next_token = LatencyModel()
        self.pending_tokens = 0.0
        """Prompt tokens of requests without a first token yet."""
        self.streams = 0
        """Requests that generate."""

    def features(self, prompt_tokens: float, streams: float) -> Features:
        """Return the features of a prediction: the backend's load plus additional tokens and streams."""
        return 1.0, (self.pending_tokens + prompt_tokens) / _TOKENS_SCALE, (self.streams + streams) / _STREAMS_SCALE


@dataclass(frozen=True, slots=True)
class Targets:
    """The latency targets of a request, in seconds; 0: none."""

    first: float = 0.0
    next: float = 0.0
    refuse: bool = False
    """Whether the request is refused if no backend is expected to meet them."""

    def missed_by(self, first: float, following: float) -> float:
        """Return by how much the worse prediction exceeds its target: 0.5 for 50 %."""
        missed = first / self.first - 1 if self.first else 0.0
        return max(missed, following / self.next - 1 if self.next else 0.0, 0.0)

    def __bool__(self) -> bool:
        return bool(self.first or self.next)


class PredictedLatency:
    """The policy. Implements `policies.PromptPolicy`."""

    def __init__(self, settings: RouterSettings, random: Random | None = None) -> None:
        self.settings: PredictedLatencySettings = settings.predicted_latency
        self.all = BackendLatency()
        """Learned from all backends together."""
        self._backends: dict[Backend, BackendLatency] = {}
        self._tree: PrefixTree[Backend] = PrefixTree(settings.cache_aware.max_tree_size)
        self._known: Sequence[Backend] = ()
        self._random = random or Random()  # noqa: S311 - spreads requests, hides nothing
        self.output_tokens = _DEFAULT_OUTPUT
        """Mean number of tokens of recent answers."""
        self.refused = 0
        """Requests refused because no backend was expected to meet their target."""

    def of(self, backend: Backend) -> BackendLatency:
        """Return the models and the load of a backend."""
        latency = self._backends.get(backend)
        if latency is None:
            latency = self._backends[backend] = BackendLatency()
        return latency

    def choose(self, live: Sequence[Backend], request: RequestView) -> tuple[Backend, str]:
        """Return a backend and the reason."""
        try:
            targets = self.targets(request.head.by_name)
        except InvalidArgument:
            targets = Targets()  # an HTTP request was refused before; a gRPC call is not
        backend, missed = self.best(live, request, targets)
        if len(live) == 1:
            return backend, ChoiceReason.ONLY
        return backend, ChoiceReason.TARGET_MISSED if missed else ChoiceReason.PREDICTED

    def best(self, live: Sequence[Backend], request: RequestView, targets: Targets) -> tuple[Backend, float]:
        """Return the backend that misses the targets least, or that would finish first; and by how much it misses them."""
        seen, now = self._tree.lengths(request.prompt), monotonic()
        best, least_missed, soonest = live[0], float("inf"), float("inf")
        characters, common = len(request.prompt), self.all
        for backend in self._compared(live, seen):
            known = self.of(backend)
            pending, streams = known.pending_tokens / _TOKENS_SCALE, known.streams / _STREAMS_SCALE
            tokens = (characters - seen.get(backend, 0)) / _CHARACTERS_PER_TOKEN
            weight = _weight(known.first_token, now)
            whole = 1.0, pending + tokens / _TOKENS_SCALE, streams
            first = _mean(known.first_token, common.first_token, whole, weight)
            work = first - _mean(known.first_token, common.first_token, (1.0, pending, streams), weight)
            after = 1.0, pending, streams + 1 / _STREAMS_SCALE
            following = _mean(known.next_token, common.next_token, after, _weight(known.next_token, now))
            missed = targets.missed_by(first, following) if targets else 0.0
            # A backend in slow start gets fewer requests than its latency alone would give it.
            seconds = (first + following * self.output_tokens + _WORK_WEIGHT * work) / backend.ramp
            # Small differences are ignored: predictions are inexact, and not all requests should go to one backend.
            if missed < least_missed or (missed == least_missed and seconds < _CLEARLY_SOONER * soonest):
                best, least_missed, soonest = backend, missed, seconds
        return best, least_missed

    def _compared(self, live: Sequence[Backend], cached_tokens: Mapping[Backend, int]) -> Sequence[Backend]:
        """Return the backends to compare, in random order: of many, some, and those that have seen most of the prompt."""
        if len(live) <= _MAX_COMPARED:
            return self._random.sample(live, len(live))
        best_cached = sorted(cached_tokens, key=cached_tokens.__getitem__, reverse=True)[: _MAX_COMPARED // 4]
        return [*self._random.sample(live, _MAX_COMPARED), *(backend for backend in best_cached if backend in live)]

    def predict(self, backend: Backend, request: RequestView) -> tuple[float, float]:
        """Return the expected seconds to the first token, and for each further one."""
        return self._predict(backend, self.uncached_tokens(backend, request), monotonic())

    def _predict(self, backend: Backend, prompt_tokens: float, now: float) -> tuple[float, float]:
        latency = self.of(backend)
        return (
            _blend(latency.first_token, self.all.first_token, latency.features(prompt_tokens, 0), now),
            _blend(latency.next_token, self.all.next_token, latency.features(0, 1), now),
        )

    def uncached_tokens(self, backend: Backend, request: RequestView) -> float:
        """Return the prompt's tokens, without those that the backend has seen."""
        return self._uncached(request, self._tree.lengths(request.prompt).get(backend, 0))

    def _uncached(self, request: RequestView, cached_tokens: int) -> float:
        return (len(request.prompt) - cached_tokens) / _CHARACTERS_PER_TOKEN

    def record(self, backend: Backend, request: RequestView) -> None:
        """Do nothing: what the backend has to compute is added when the request is sent."""

    def sent(self, backend: Backend, request: RequestView) -> None:
        """Note that the backend sees the prompt."""
        if request.prompt:
            self._tree.add(request.prompt, backend)

    def targets(self, by_name: Mapping[bytes, bytes]) -> Targets:
        """Return the targets of a request. Raises InvalidArgument."""
        settings = self.settings
        first, following = by_name.get(TTFT_HEADER), by_name.get(TPOT_HEADER)
        refuse = by_name.get(REFUSE_HEADER)
        return Targets(
            settings.ttft_seconds if first is None else _milliseconds(TTFT_HEADER, first),
            settings.tpot_seconds if following is None else _milliseconds(TPOT_HEADER, following),
            settings.refuse if refuse is None else refuse.lower() not in (b"0", b"false", b"no", b""),
        )

    def explain(self, live: Sequence[Backend], request: RequestView) -> dict[str, Any]:
        """Return the predictions for all backends."""
        targets = self.targets(request.head.by_name)
        predictions = {}
        for backend in live:
            latency = self.of(backend)
            first, following = self.predict(backend, request)
            predictions[backend.name] = {
                "ttft_ms": round(1000 * first, 1),
                "tpot_ms": round(1000 * following, 2),
                "missed_by": round(targets.missed_by(first, following), 3),
                "uncached_tokens": round(self.uncached_tokens(backend, request)),
                "pending_tokens": round(latency.pending_tokens),
                "streams": latency.streams,
                "samples": latency.first_token.samples,
            }
        target_json = {"ttft_ms": 1000 * targets.first or None, "tpot_ms": 1000 * targets.next or None}
        return {"targets": target_json, "output_tokens": round(self.output_tokens), "predictions": predictions}

    def tick(self, backends: Sequence[Backend], now: float) -> None:
        """Forget removed backends."""
        if backends is not self._known:
            for backend in set(self._known) - set(backends):
                self._tree.remove(backend)
                self._backends.pop(backend, None)
            self._known = backends

    def errors(self) -> dict[tuple[str, ...], float]:
        """Return the mean relative errors of recent predictions, for metrics."""
        return {("ttft",): self.all.first_token.error, ("tpot",): self.all.next_token.error}


def _blend(own: LatencyModel, common: LatencyModel, features: Features, now: float) -> float:
    """Return the prediction of a backend's own model, and of the common one as far as the own has few or old samples."""
    return _mean(own, common, features, _weight(own, now))


def _weight(own: LatencyModel, now: float) -> float:
    """Return how many samples a model counts as."""
    samples: float = min(own.samples, _MAX_SAMPLES) * 0.5 ** ((now - own.last) / _HALF_LIFE_SECONDS)
    return samples


def _mean(own: LatencyModel, common: LatencyModel, features: Features, samples: float) -> float:
    return (samples * own.predict(features) + _COMMON_SAMPLES * common.predict(features)) / (samples + _COMMON_SAMPLES)


def _milliseconds(name: bytes, value: bytes) -> float:
    try:
        seconds = float(value) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"{name.decode()} is a number of milliseconds, such as 500; 0 means no target")
    return seconds


class LatencyTimer:
    """Refuses a request whose targets cannot be met, counts it as load, and updates the models with its latencies."""

    def __init__(self, policy: PredictedLatency) -> None:
        self._policy = policy
        self._known: BackendLatency | None = None
        """Of the backend of the current attempt."""
        self._prompt_tokens = 0.0
        self._features: Features | None = None
        """Features of the time to first token; None if nothing can be learned from it."""
        self._sent = self._first = 0.0
        self._next_features: Features = (0.0, 0.0, 0.0)
        """The load when the first token came."""
        self._events = 0

    def check(self, view: RequestView, live: Sequence[Backend]) -> None:
        """Raise ResourceExhausted for a request with `x-slo-refuse` if no backend is expected to meet its targets."""
        policy = self._policy
        targets = policy.targets(view.head.by_name)
        if not targets or not targets.refuse or not live:
            return
        backend, missed = policy.best(live, view, targets)
        if not missed:
            return
        policy.refused += 1
        first, following = policy.predict(backend, view)
        raise ResourceExhausted(
            f"no backend is expected to keep the latency target: the best one would take {1000 * first:.0f} ms to "
            f"the first token and {1000 * following:.1f} ms for each further one",
            retry_after_seconds=1,
        )

    def sent(self, backend: Backend, view: RequestView, *, learn: bool = True) -> None:
        """Count the prompt as one that the backend has to compute."""
        policy = self._policy
        latency = self._known = policy.of(backend)
        self._prompt_tokens = policy.uncached_tokens(backend, view)
        policy.sent(backend, view)
        self._features = latency.features(self._prompt_tokens, 0) if learn else None
        latency.pending_tokens += self._prompt_tokens
        self._first, self._events = 0.0, 0
        self._sent = monotonic()

    def whole(self) -> None:
        """Learn nothing from a whole response: how much of the time was for the first token is not known."""
        self._features = None

    def piece(self, data: Buffer) -> None:
        """Learn the time to the first token, and count the events."""
        events = bytes(data).count(_END_OF_EVENT)
        latency = self._known
        if not events or latency is None:
            return
        if not self._events:
            self._begin(latency)
        self._events += events

    def ended(self) -> None:
        """Learn the time between events, and take the request out of the backend's load."""
        latency, self._known = self._known, None
        if latency is None:
            return
        if not self._events:
            latency.pending_tokens = max(0.0, latency.pending_tokens - self._prompt_tokens)
            return
        before, after = self._next_features, latency.features(0, 0)
        latency.streams -= 1
        if self._events < _LEAST_EVENTS or self._features is None:
            return
        policy, now = self._policy, monotonic()
        features = 1.0, (before[1] + after[1]) / 2, (before[2] + after[2]) / 2
        seconds = (now - self._first) / (self._events - 1)
        latency.next_token.learn(features, seconds, now)
        policy.all.next_token.learn(features, seconds, now)
        policy.output_tokens += 0.02 * (self._events - policy.output_tokens)

    def _begin(self, latency: BackendLatency) -> None:
        now = self._first = monotonic()
        latency.pending_tokens = max(0.0, latency.pending_tokens - self._prompt_tokens)
        latency.streams += 1
        self._next_features = latency.features(0, 0)
        if self._features is not None:
            latency.first_token.learn(self._features, now - self._sent, now)
            self._policy.all.first_token.learn(self._features, now - self._sent, now)


class TimedRequest(RequestStrategy):
    """The strategy of a request through the router."""

    def __init__(self, policy: PredictedLatency) -> None:
        self._timer = LatencyTimer(policy)

    def start(self, request: ProxiedRequest) -> bool:
        """Refuse the request if it has `x-slo-refuse` and no backend is expected to meet its targets."""
        chooser = request.router.chooser
        if chooser is not None:
            try:
                self._timer.check(request.view_for(chooser), chooser.candidates())
            except HeadraceError as error:
                request.refuse(error)
                return True
        return False

    def sending(self, request: ProxiedRequest) -> None:
        """Count the request as load of its backend."""
        chooser = request.router.chooser
        if request.backend is not None and chooser is not None:
            # A continuation says nothing about the time to first token.
            self._timer.sent(request.backend, request.view_for(chooser), learn=not request.exchange.started)

    def response_received(self, request: ProxiedRequest, head: UpstreamHead) -> bool:
        """Learn nothing from a whole response."""
        self._timer.whole()
        return True

    def response_piece(self, data: Buffer) -> None:
        """Learn from a piece of a stream."""
        self._timer.piece(data)

    def attempt_ended(self) -> None:
        """Take the request out of the load."""
        self._timer.ended()
