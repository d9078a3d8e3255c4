# SPDX-License-Identifier: Apache-2.0
"""Planning: the objects that a cluster needs for one service.

Pure. `plan` is the way in: it admits, selects, merges, and has each module here write the objects of one kind or mode. The
same service, facts and live objects give the same objects, in the same order. Who applies them, and deletes what is no
longer among them, stands elsewhere.
"""

from __future__ import annotations

from headrace.fleet.planning.parts import Rise
from headrace.fleet.planning.plan import Plan, plan
from headrace.fleet.planning.revisions import Rollout, rollout
from headrace.fleet.planning.routes import Urls

__all__ = ["Plan", "Rise", "Rollout", "Urls", "plan", "rollout"]
