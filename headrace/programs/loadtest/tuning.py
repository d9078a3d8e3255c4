# SPDX-License-Identifier: Apache-2.0
"""The settings that `headrace tune` may change in a model's configuration, and their ranges."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument

DELAYS = (0, 100, 250, 500, 1000, 2000, 5000, 10_000, 20_000)
"""Delays to try, in microseconds. Smaller steps are within the noise."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to schedule a model."""

    max_batch_size: int
    """0 for a model without batching."""
    delay_microseconds: int | None
    """How long a request may wait for a batch; None: no dynamic batching."""
    instances: int

    @property
    def batches_requests(self) -> bool:
        """Whether requests are batched."""
        return self.delay_microseconds is not None and self.max_batch_size > 0

    def __str__(self) -> str:
        """Describe the setting."""
        count = f"{self.instances} instance{'s' if self.instances != 1 else ''}"
        if not self.max_batch_size:
            return f"no batches, {count}"
        if self.delay_microseconds is None:
            return f"batches of {self.max_batch_size}, not joined, {count}"
        return f"batches of {self.max_batch_size}, delay {self.delay_microseconds} us, {count}"


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try, in order, including the current ones."""

    batches: tuple[int, ...]
    delays: tuple[int | None, ...]
    instances: tuple[int, ...]

    def __contains__(self, setting: Setting) -> bool:
        """Return whether a setting consists of these values."""
        return (
            setting.max_batch_size in self.batches
            and setting.delay_microseconds in self.delays
            and setting.instances in self.instances
        )


def setting_of(config: Mapping[str, Any]) -> Setting:
    """Return a model's current setting."""
    batching = config.get("dynamic_batching")
    delay = None if batching is None else int(batching.get("max_queue_delay_microseconds") or 0)
    groups = config.get("instance_group") or [{}]
    return Setting(int(config.get("max_batch_size") or 0), delay, max(int(groups[0].get("count") or 1), 1))


def with_setting(config: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """Return a configuration with another setting; only what differs is changed."""
    changed = copy.deepcopy(dict(config))
    now = setting_of(config)
    if setting.max_batch_size != now.max_batch_size:
        changed["max_batch_size"] = setting.max_batch_size
        batching = changed.get("dynamic_batching") or {}
        if batching.get("preferred_batch_size"):
            sizes = [size for size in batching["preferred_batch_size"] if int(size) <= setting.max_batch_size]
            batching["preferred_batch_size"] = sizes
    if setting.delay_microseconds is None:
        changed.pop("dynamic_batching", None)
    elif setting.delay_microseconds != now.delay_microseconds or _is_auto(config):
        batching = changed.setdefault("dynamic_batching", {})
        batching["max_queue_delay_microseconds"] = setting.delay_microseconds
        batching.pop("max_queue_delay_auto", None)
    if setting.instances != now.instances:
        groups = changed.setdefault("instance_group", []) or [{}]
        groups[0]["count"] = setting.instances
        changed["instance_group"] = groups
    return changed


def space_of(
    config: Mapping[str, Any], *, latency_ms: float, rows: int, max_batch: int | None, max_instances: int
) -> Space:
    """Return the values to try. A batch is not larger than the model's limit unless `max_batch` says so."""
    _check(config, rows)
    now = setting_of(config)
    instances = tuple(count for count in _doubled(now.instances, max_instances) if count <= max_instances)
    if len(config.get("instance_group") or ()) > 1:
        instances = (now.instances,)
    if not now.max_batch_size or config.get("sequence_batching") is not None:
        return Space((now.max_batch_size,), (now.delay_microseconds,), instances)
    largest = max_batch or now.max_batch_size
    batches = tuple(size for size in _doubled(now.max_batch_size, largest) if rows <= size <= largest)
    if not batches:
        raise InvalidArgument(f"--max-batch {largest} is less than the {rows} rows of a request: give a larger one")
    # More than half of the target would be waiting.
    allowed: list[int | None] = [delay for delay in DELAYS if delay <= latency_ms * 1000 / 2]
    if now.delay_microseconds not in allowed:
        allowed.append(now.delay_microseconds)
    return Space(batches, tuple(sorted(allowed, key=lambda delay: -1 if delay is None else delay)), instances)


def _check(config: Mapping[str, Any], rows: int) -> None:
    name = config.get("name", "")
    if config.get("ensemble_scheduling") is not None:
        raise FailedPrecondition(
            f"'{name}' is an ensemble, which computes nothing itself: tune the models it is made of"
        )
    if (config.get("model_transaction_policy") or {}).get("decoupled"):
        raise FailedPrecondition(f"'{name}' answers any number of times (decoupled): one latency does not describe it")
    limit = int(config.get("max_batch_size") or 0)
    if rows > max(limit, 1):
        raise InvalidArgument(f"--rows {rows}: '{name}' takes at most {max(limit, 1)} in a request")


def _doubled(now: int, largest: int) -> tuple[int, ...]:
    """Return powers of two up to a maximum, and the current value."""
    sizes = {now, largest}
    size = 1
    while size <= largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def _is_auto(config: Mapping[str, Any]) -> bool:
    return bool((config.get("dynamic_batching") or {}).get("max_queue_delay_auto"))
