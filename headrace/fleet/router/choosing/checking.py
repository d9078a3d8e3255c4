# SPDX-License-Identifier: Apache-2.0
"""Whether settings of choices can be meant so. Asked by `cli.router_settings`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RouterSettings

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


def check_choices(settings: RouterSettings) -> None:
    """Raises InvalidArgument."""
    cache, prefix, sticky, hedging = settings.cache_aware, settings.prefix_hash, settings.sticky, settings.hedging
    if not 0 <= cache.cache_threshold <= 1:
        raise InvalidArgument(f"cache_aware.cache_threshold is a share from 0 to 1, not {cache.cache_threshold:g}")
    if prefix.characters < 1 or prefix.load_factor < 1:
        raise InvalidArgument("prefix_hash.characters is at least 1, and prefix_hash.load_factor too")
    if not 0 <= hedging.percentile < 1 or not 0 <= hedging.budget <= 1:
        raise InvalidArgument("hedging.percentile is a share below 1, such as 0.95, and hedging.budget one up to 1")
    if sum(map(bool, (sticky.cookie, sticky.header, sticky.body))) > 1:
        raise InvalidArgument("sticky has a cookie, a header or a key of the body: one of them")
    for name, value in (("cookie", sticky.cookie), ("header", sticky.header)):
        if value and not _TOKEN.fullmatch(value):
            raise InvalidArgument(f"sticky.{name} is a name without spaces, not {value!r}")
    if settings.paired and hedging.wanted:
        raise InvalidArgument("hedging and roles of backends do not go together: leave one of them out")
    if settings.pairing.prefill_seconds <= 0:
        raise InvalidArgument("pairing.prefill_seconds is a number over 0")
    if settings.discovery.port > 65535:
        raise InvalidArgument("discovery.port is a port, up to 65535")
