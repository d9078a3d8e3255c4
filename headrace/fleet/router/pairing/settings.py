# SPDX-License-Identifier: Apache-2.0
"""What a router can be told about prefill and decode apart: the section `pairing`. Part of `router.settings`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairingSettings:
    """See the module."""

    enabled: bool = False
    """Backends may have roles although none that is named has one: those that are found say theirs."""
    least_bytes: int = 2048
    """Requests with a shorter body go to a decoder at once: to hand a short prompt over takes longer than to compute it."""
    prefill_seconds: float = 30.0
    """How long a prefill may take; then a decoder computes the prompt."""
    key_file: str = ""
    """With the key of the fleet, which prefills of other machines want to see. HEADRACE_HANDING_KEY has it otherwise."""
