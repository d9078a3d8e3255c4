# SPDX-License-Identifier: Apache-2.0
"""Planning: the Kubernetes objects of one service.

`plan` is the entry point: admission, selection, merging, then the objects of each component. The same service, facts and
live objects give the same objects in the same order. `cluster.apply` applies them.
"""

from __future__ import annotations

from headrace.fleet.planning.component_plan import ScaleUp
from headrace.fleet.planning.ingress import Urls
from headrace.fleet.planning.plan import Plan, plan
from headrace.fleet.planning.revisions import Rollout, plan_rollout

__all__ = ["Plan", "Rollout", "ScaleUp", "Urls", "plan", "plan_rollout"]
