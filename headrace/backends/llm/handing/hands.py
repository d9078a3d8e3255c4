# SPDX-License-Identifier: Apache-2.0
"""What a server does with pages that are handed over: keeps them, gives them, takes them. One for each process.

Made by `backend` for a server that has a role. `ModelHands` is what the instances of one version see: `give` and `take` are
for threads that may wait, and neither raises for what can be mended by computing the prompt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from headrace.backends.llm.handing.giving import Giver
from headrace.backends.llm.handing.keeping import Keeper, NoRoom, machine_key, own_folder
from headrace.backends.llm.handing.layout import bytes_of_page, pieces
from headrace.backends.llm.handing.metrics import GIVEN, TAKEN, HandingMetrics
from headrace.backends.llm.handing.taking import NotTaken, leave, take
from headrace.backends.llm.running.kv_cache import KVCache
from headrace.core.handing import BadTicket, HandingSettings, Offer
from headrace.core.telemetry.registry import Registry

log = logging.getLogger("headrace.backends.llm")


class Hands:
    """See the module."""

    def __init__(
        self, settings: HandingSettings, metrics: HandingMetrics, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.folder = own_folder()
        self.key = settings.key or machine_key(self.folder)
        self.metrics = metrics
        self.keeper: Keeper | None = None
        self.giver: Giver | None = None
        if settings.role == "prefill":
            self.keeper = Keeper(self.folder, most_bytes=settings.keep_bytes, seconds=settings.keep_seconds)
            try:
                self.giver = Giver(self.keeper, self.key, settings.host, settings.port, clock=clock)
            except BaseException:
                self.keeper.close()
                raise
            log.info("pages of prompts are given at %s:%d", settings.host, self.giver.port)

    def of(self, model: str, version: int) -> ModelHands:
        """For the instances of one version."""
        return ModelHands(self, model, str(version))

    def close(self) -> None:
        """Keep and give no more."""
        if self.giver is not None:
            self.giver.close()
        if self.keeper is not None:
            self.keeper.close()


class SharedHands:
    """The same for all models of a server: made when the first comes, closed when the last has gone. From any thread."""

    def __init__(self, settings: HandingSettings, registry: Registry) -> None:
        self._settings = settings
        self._metrics = HandingMetrics(registry)
        self._lock = threading.Lock()
        self._users = 0
        self._hands: Hands | None = None

    def join(self) -> Hands:
        """One model more. Raises FailedPrecondition where nothing can be kept or given."""
        with self._lock:
            if self._hands is None:
                self._hands = Hands(self._settings, self._metrics)
            self._users += 1
            return self._hands

    def leave(self) -> None:
        """One model less."""
        with self._lock:
            self._users -= 1
            if not self._users and self._hands is not None:
                self._hands.close()
                self._hands = None


class ModelHands:
    """See the module."""

    def __init__(self, hands: Hands, model: str, version: str) -> None:
        self._hands = hands
        self._given = hands.metrics.of(model, version, GIVEN)
        self._taken = hands.metrics.of(model, version, TAKEN)

    def give(self, identity: str, digest: bytes, block: torch.Tensor, page_size: int) -> str:
        """Keep the pages of a prompt; the ticket for them, or "" if they cannot be kept."""
        hands, began = self._hands, time.monotonic()
        if hands.keeper is None or hands.giver is None:
            return ""
        try:
            kept = hands.keeper.keep(pieces(block), block.numel(), len(block), hands.clock())
        except NoRoom as error:
            log.info("the pages of a prompt are not kept: %s", error)
            self._given.fell_back("no_room")
            return ""
        offer = Offer(
            kept.id,
            identity,
            digest.hex(),
            len(block),
            block.shape[1],
            hands.keeper.place(kept.id),
            hands.settings.host,
            hands.giver.port,
            kept.until,
        )
        self._given.done("kept", kept.bytes, kept.pages * page_size, time.monotonic() - began)
        return offer.signed(hands.key)

    def take(
        self, ticket: str, identity: str, digests: Sequence[bytes], cache: KVCache, have: int
    ) -> tuple[int, torch.Tensor] | None:
        """The pages of a prompt with these digests, of which the first `have` are here: number of the first, and bytes.

        None where the prompt, or what is left of it, has to be computed here.
        """
        hands, began, page_bytes = self._hands, time.monotonic(), bytes_of_page(cache)
        try:
            offer = Offer.read(ticket, hands.key, hands.clock())
            if offer.model != identity or offer.page_bytes != page_bytes:
                raise NotTaken("other_model", "they were computed with other weights or laid out in another way")
            if not digests or offer.pages != len(digests) or offer.digest != digests[-1].hex():
                raise NotTaken("other_prompt", "they are of another prompt")
            if have >= offer.pages:
                leave(offer, hands.folder)
                self._taken.done("not_needed", 0, 0, time.monotonic() - began)
                return None
            # From memory that the driver knows, the engine's thread need not wait until the pages are on the GPU.
            pinned = cache.device.type == "cuda"
            block = torch.empty(offer.pages - have, page_bytes, dtype=torch.uint8, pin_memory=pinned)
            way = take(offer, have, memoryview(block.numpy()).cast("B"), hands.folder, hands.key, self._seconds)
        except BadTicket as error:
            self._not_taken("bad_ticket", error)
            return None
        except NotTaken as error:
            self._not_taken(error.reason, error)
            return None
        self._taken.done(way, block.numel(), len(block) * cache.page_size, time.monotonic() - began)
        return have, block

    @property
    def _seconds(self) -> float:
        return self._hands.settings.take_seconds

    def short(self) -> None:
        """A prompt had not one full page."""
        self._given.fell_back("short")

    def _not_taken(self, reason: str, error: Exception) -> None:
        log.info("a prompt is computed here, for its pages were not taken: %s", error)
        self._taken.fell_back(reason)
