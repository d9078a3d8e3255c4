# SPDX-License-Identifier: Apache-2.0
"""What the console asks beside the job API: whose token this is and what they may do, and what was done lately.

NVIDIA's API has no such paths; these are ours, below `/api/v2`.
"""

from __future__ import annotations

import asyncio

from headrace.api.access.audit import Audit
from headrace.api.access.roles import OPERATIONS, may
from headrace.jobs.api.calls import Answer, Call
from headrace.jobs.api.reading import number_of

_LINES, _MOST_LINES = 100, 1000


class Insight:
    """Work for `calls`."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    async def session(self, call: Call) -> Answer:
        """Who asks, and every operation that their role allows in this organisation."""
        who = call.principal
        role = who.role_in(call.org) or ""
        told = {
            "user_id": who.user_id,
            "user_name": who.user_name,
            "user_email": who.email,
            "organisation": call.org,
            "role": role,
            "may": [each for each in OPERATIONS if may(role, each)],
        }
        return Answer(told)

    async def audit(self, call: Call) -> Answer:
        """The newest lines of the audit log about this organisation; `size` says how many."""
        size = number_of(call.query(), "size")
        most = _LINES if size is None else min(size, _MOST_LINES)
        return Answer({"events": await asyncio.to_thread(self._audit.recent, call.org, most)})
