# SPDX-License-Identifier: Apache-2.0
"""Fairness between tenants: while requests wait, each tenant gets its share of the tokens.

A tenant is the holder of an API key, or the value of a header. Each has a counter of the tokens of its prompts and answers,
divided by its share. When a backend has room, the waiting tenant with the lowest counter is next ("virtual token counter").
Tokens are counted as they pass, so that nothing has to be known in advance of how long an answer will be.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import HeadraceError, InvalidArgument, ResourceExhausted
from headrace.fleet.router.request_queue import QueuedRequest, RequestQueue

if TYPE_CHECKING:
    from headrace.fleet.router.settings import FairnessSettings, QueueSettings
    from headrace.net.http.heads import Buffer, RequestHead

ANONYMOUS = "anonymous"
"""The tenant of requests without a known key, or without the header."""
BYTES_PER_TOKEN = 4
"""Bytes per token: estimates the tokens of a prompt until its backend reports them, and of data without tokens."""
_CREDIT_TOKENS = 16_384
"""Tokens that an idle tenant may use as a burst, before it is the turn of the others."""
_MAX_TENANTS = 4096
_TENANT_NAME = re.compile(rb"[A-Za-z0-9_.@:/-]{1,64}")
_PRIORITY = re.compile(r"-?[0-9]{1,6}")
_USAGE = re.compile(rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens)"\s*:\s*([0-9]{1,9})')
_PROMPT_NAMES = (b"prompt_tokens", b"input_tokens")
_END_OF_EVENT = b"\n\n"


class TenantSpec(Protocol):
    """Settings of a tenant: an entry of the keys file, or `EqualTenant`."""

    @property
    def name(self) -> str:
        """Its name, in logs and metrics."""

    @property
    def share(self) -> float:
        """Its share of the tokens, relative to the shares of the others."""

    @property
    def priority(self) -> int:
        """Priority of its waiting requests; higher is first."""

    @property
    def prompt_tokens_per_minute(self) -> int:
        """Limit for its prompts; 0: that of the settings."""

    @property
    def output_tokens_per_minute(self) -> int:
        """Limit for its answers; 0: that of the settings."""


FindTenant = Callable[[Mapping[bytes, bytes], float], TenantSpec | None]
"""Finds the tenant of a request by its header fields; the number is the monotonic time."""


@dataclass(frozen=True, slots=True)
class EqualTenant:
    """A tenant without settings of its own."""

    name: str
    share: float = 1.0
    priority: int = 0
    prompt_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0


class TokenBudget:
    """A limit of tokens per minute. It may go into debt, since the length of an answer is not known in advance."""

    __slots__ = ("_at", "_left", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = monotonic()

    def spend(self, tokens: float) -> None:
        """Take tokens, or return unused ones."""
        self._left -= tokens

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until tokens are available; 0 if some are."""
        per_second = self.per_minute / 60
        self._left = min(self.per_minute, self._left + max(0.0, now - self._at) * per_second)
        self._at = now
        return 0.0 if self._left > 0 else (1 - self._left) / per_second


class Tenant:
    """The counters of one tenant."""

    def __init__(self, spec: TenantSpec, settings: FairnessSettings) -> None:
        self._settings = settings
        self.counter = 0.0
        """Tokens divided by the share, lifted when the tenant was idle."""
        self.requests = 0
        """Requests that were sent to a backend."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queued = 0
        self.waited_seconds = 0.0
        """Time that its requests spent in the queue."""
        self.refused_queue = 0
        """Requests refused because the queue was full or they waited too long."""
        self.refused_budget = 0
        """Requests refused for a limit of tokens per minute."""
        self.prompt_budget: TokenBudget | None = None
        self.output_budget: TokenBudget | None = None
        self.update(spec)

    def update(self, spec: TenantSpec) -> None:
        """Apply the tenant's settings."""
        settings = self._settings
        self.spec = spec
        self.name, self.share, self.priority = spec.name, spec.share, spec.priority
        self.prompt_budget = _budget(
            self.prompt_budget, spec.prompt_tokens_per_minute or settings.prompt_tokens_per_minute
        )
        self.output_budget = _budget(
            self.output_budget, spec.output_tokens_per_minute or settings.output_tokens_per_minute
        )

    def check_budgets(self, now: float) -> None:
        """Raise ResourceExhausted while the tenant has used up its tokens."""
        for budget, kind in ((self.prompt_budget, "prompt"), (self.output_budget, "output")):
            wait = budget.wait_seconds(now) if budget is not None else 0.0
            if budget is None or not wait:
                continue
            self.refused_budget += 1
            raise ResourceExhausted(
                f"{self.name!r} has used its {budget.per_minute} {kind} tokens per minute: try again in "
                f"{wait:.0f} s, or ask for a higher limit",
                retry_after_seconds=wait,
            )

    def as_json(self) -> dict[str, Any]:
        """Return the counters for the status."""
        prompt, output = self.prompt_budget, self.output_budget
        return {
            "name": self.name,
            "share": self.share,
            "priority": self.priority,
            "requests": self.requests,
            "queued": self.queued,
            "waited_seconds": round(self.waited_seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "prompt_tokens_per_minute": prompt.per_minute if prompt is not None else None,
            "output_tokens_per_minute": output.per_minute if output is not None else None,
            "refused": {"queue": self.refused_queue, "budget": self.refused_budget},
        }


def _budget(current: TokenBudget | None, per_minute: int) -> TokenBudget | None:
    if not per_minute:
        return None
    return current if current is not None and current.per_minute == per_minute else TokenBudget(per_minute)


class TokenUsage:
    """The tokens of one request, counted while it is passed on."""

    __slots__ = ("_begun", "_fairness", "_output_tokens", "_prompt_tokens", "tenant")

    def __init__(self, fairness: Fairness, tenant: Tenant, prompt_tokens: int) -> None:
        self._fairness = fairness
        self.tenant = tenant
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._begun = False

    def begin(self) -> None:
        """Count the prompt: the request is sent to a backend."""
        if not self._begun:
            self._begun = True
            tenant, tokens = self.tenant, self._prompt_tokens
            self._fairness.begin(tenant)
            tenant.requests += 1
            self._prompt_tokens = 0
            self._set_prompt(tokens)

    def add_prompt_bytes(self, size: int) -> None:
        """Count a piece of a request whose length was not known; if it still waits, when it is sent."""
        tokens = self._prompt_tokens + -(-size // BYTES_PER_TOKEN)
        if self._begun:
            self._set_prompt(tokens)
        else:
            self._prompt_tokens = tokens

    def add_output_bytes(self, size: int) -> None:
        """Count a piece of a response that has no tokens."""
        self._set_output(self._output_tokens + -(-size // BYTES_PER_TOKEN))

    def add(self, data: Buffer) -> None:
        """Count a piece of a response: one token for each event, until `usage` says how many there were."""
        data = bytes(data)
        events = data.count(_END_OF_EVENT)
        if events:
            self._set_output(self._output_tokens + events)
        if b'"usage"' in data:
            for name, number in _USAGE.findall(data):
                if name in _PROMPT_NAMES:
                    self._set_prompt(int(number))
                else:
                    self._set_output(int(number))

    def _set_prompt(self, tokens: int) -> None:
        tenant, more = self.tenant, tokens - self._prompt_tokens
        self._prompt_tokens = tokens
        tenant.prompt_tokens += more
        tenant.counter += more / tenant.share
        if tenant.prompt_budget is not None:
            tenant.prompt_budget.spend(more)

    def _set_output(self, tokens: int) -> None:
        tenant, more = self.tenant, tokens - self._output_tokens
        self._output_tokens = tokens
        tenant.output_tokens += more
        tenant.counter += more * self._fairness.output_weight / tenant.share
        if tenant.output_budget is not None:
            tenant.output_budget.spend(more)


def parse_priorities(text: str) -> dict[str, int]:
    """Parse `interactive=10,batch=-10`. Raises InvalidArgument."""
    priorities: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if not _TENANT_NAME.fullmatch(name.encode()) or not _PRIORITY.fullmatch(number):
            raise InvalidArgument(
                f"fairness.priorities has {part[:80]!r}: write names with whole numbers, such as interactive=10,batch=-10"
            )
        priorities[name] = int(number)
    return priorities


class Fairness:
    """All tenants of a router. Used from the loop's thread only."""

    def __init__(self, settings: FairnessSettings, find: FindTenant | None = None) -> None:
        """`find`: finds a tenant by its key; None: the header `settings.tenant_header` names it."""
        self.settings = settings
        self.output_weight = settings.output_weight
        self.tenants: dict[str, Tenant] = {}
        self._find = find
        self._header = settings.tenant_header.lower().encode()
        self._anonymous = EqualTenant(ANONYMOUS)
        self._priorities = parse_priorities(settings.priorities)
        self._reached = 0.0
        """Highest counter of any tenant when it sent a request; counters of idle tenants are raised nearly to it."""

    def admit(self, head: RequestHead, body_bytes: int) -> TokenUsage:
        """Return the counter for a request. Raises ResourceExhausted if its tenant has used up its tokens."""
        now = monotonic()
        tenant = self._tenant(head.by_name, now)
        tenant.check_budgets(now)
        return TokenUsage(self, tenant, -(-body_bytes // BYTES_PER_TOKEN))

    def lift(self, tenant: Tenant) -> None:
        """Raise the counter of a tenant that was idle, so that it cannot save up more than a burst."""
        tenant.counter = max(tenant.counter, self._reached - _CREDIT_TOKENS)

    def begin(self, tenant: Tenant) -> None:
        """Note that a request of a tenant is sent to a backend."""
        self.lift(tenant)
        self._reached = max(self._reached, tenant.counter)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the tenants for the status."""
        return [tenant.as_json() for tenant in self.tenants.values()]

    def _tenant(self, by_name: Mapping[bytes, bytes], now: float) -> Tenant:
        spec: TenantSpec | None = None
        if self._find is not None:
            spec = self._find(by_name, now)
            name = spec.name if spec is not None else ANONYMOUS
        else:
            value = by_name.get(self._header, b"")
            name = value.decode() if _TENANT_NAME.fullmatch(value) else ANONYMOUS
        tenant = self.tenants.get(name)
        if tenant is None:
            return self._add(spec or EqualTenant(name, priority=self._priorities.get(name, 0)))
        if spec is not None and spec is not tenant.spec:
            tenant.update(spec)
        return tenant

    def _add(self, spec: TenantSpec) -> Tenant:
        if len(self.tenants) >= _MAX_TENANTS:
            # A tenant that would be lifted anyway needs no entry.
            floor = self._reached - _CREDIT_TOKENS
            idle = [name for name, tenant in self.tenants.items() if not tenant.queued and tenant.counter <= floor]
            for name in idle:
                del self.tenants[name]
            if not idle and spec.name != ANONYMOUS:
                spec = self._anonymous
                if ANONYMOUS in self.tenants:
                    return self.tenants[ANONYMOUS]
        tenant = self.tenants[spec.name] = Tenant(spec, self.settings)
        return tenant


class FairQueue(RequestQueue):
    """A queue in which the tenants take turns: by priority, which grows with the wait, and then by their counters."""

    def __init__(self, settings: QueueSettings, has_capacity: Callable[[], bool], fairness: Fairness) -> None:
        super().__init__(settings, has_capacity)
        self._fairness = fairness
        self._queues: dict[Tenant, deque[tuple[float, QueuedRequest]]] = {}
        """Waiting requests of each tenant that has some, oldest first."""

    def _push(self, now: float, request: QueuedRequest) -> None:
        tenant = _tenant_of(request)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
            self._fairness.lift(tenant)
        queue.append((now, request))
        tenant.queued += 1

    def _pop(self) -> QueuedRequest:
        now = asyncio.get_running_loop().time()
        ageing = self._fairness.settings.ageing_seconds
        # At most the highest priority: a tenant must not overtake others by sending more than can be served.
        highest = max(tenant.priority for tenant in self._queues)

        def rank(tenant: Tenant) -> tuple[int, float]:
            waited = now - self._queues[tenant][0][0]
            return min(highest, tenant.priority + int(waited / ageing)), -tenant.counter

        return self._take_oldest(max(self._queues, key=rank))

    def _pop_expired(self, before: float) -> Iterator[QueuedRequest]:
        for tenant in tuple(self._queues):
            queue = self._queues[tenant]
            while queue and (queue[0][0] <= before or queue[0][1].is_gone()):
                yield self._take_oldest(tenant)

    def _drop_gone(self) -> None:
        for tenant, queue in tuple(self._queues.items()):
            kept = deque(entry for entry in queue if not entry[1].is_gone())
            tenant.queued = len(kept)
            if kept:
                self._queues[tenant] = kept
            else:
                del self._queues[tenant]
        self.length = sum(map(len, self._queues.values()))

    def _make_room(self, request: QueuedRequest) -> bool:
        """Refuse the oldest request of the tenant with the most queued requests per share, unless it is the new one's."""
        tenant_of_request = _tenant_of(request)
        largest = max(self._queues, key=lambda tenant: tenant.queued / tenant.share, default=tenant_of_request)
        if (
            largest is tenant_of_request
            or largest.queued / largest.share <= (tenant_of_request.queued + 1) / tenant_of_request.share
        ):
            return False
        oldest = self._take_oldest(largest)
        self.length -= 1
        self._refuse(oldest, self._full_error())
        return True

    def _refuse(self, request: QueuedRequest, error: HeadraceError) -> None:
        _tenant_of(request).refused_queue += 1
        super()._refuse(request, error)

    def _take_oldest(self, tenant: Tenant) -> QueuedRequest:
        queue = self._queues[tenant]
        since, request = queue.popleft()
        if not queue:
            del self._queues[tenant]
        tenant.queued -= 1
        tenant.waited_seconds += asyncio.get_running_loop().time() - since
        return request


def _tenant_of(request: QueuedRequest) -> Tenant:
    usage = request.usage
    if usage is None:
        raise TypeError("a request entered the fair queue without a tenant")
    return usage.tenant
