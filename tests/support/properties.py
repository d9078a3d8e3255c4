# SPDX-License-Identifier: Apache-2.0
"""How many examples a property is tried with: by `make fuzz`, three times as many as by the tests.

`--hypothesis-profile` is `quick` (the default), where the same code has the same examples every time, or `explore`, which
looks for others.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_DEFAULT_EXAMPLES = 100
# How quick a machine is decides nothing: neither by the time of one example nor by that of making one.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_DEFAULT_EXAMPLES)


def register_profiles() -> None:
    """Make the profiles known, and load `quick`."""
    settings.register_profile("quick", _PATIENT, derandomize=True, max_examples=_third(_DEFAULT_EXAMPLES))
    settings.register_profile("explore", _PATIENT)
    settings.load_profile("quick")


def examples(count: int) -> int:
    """Return how many of so many examples are tried; for `max_examples`."""
    return _third(count) if settings.get_current_profile_name() == "quick" else count


def _third(count: int) -> int:
    return max(1, count // 3)
