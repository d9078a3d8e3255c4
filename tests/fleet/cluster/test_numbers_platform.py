# SPDX-License-Identifier: Apache-2.0
"""How many calls services cost, on a real API server. `bench/scenarios/fleet.py idle` has the numbers for 500 of them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SERVICES = 6


def test_calls_grow_with_what_is_made_and_not_with_what_is_there(clean: Any) -> None:
    from controller_site import Running

    from headrace.programs.operator import OperatorSettings

    once = OperatorSettings(discover_seconds=600)  # one discovery, however long this machine takes
    (model, service) = clean.sample("cpu")
    names = [f"digits-{number}" for number in range(SERVICES)]
    documents = [{**service, "metadata": {"name": each, "namespace": "default"}} for each in names]
    with Running(clean.server.kubeconfig, once) as running:
        clean.apply(model)
        running.settle()
        api = running.controller.api
        calls, writes = api.calls, len(running.writes)
        clean.apply(*documents)
        running.settle()
        made = len(clean.children()) // SERVICES
        wrote = (len(running.writes) - writes) / SERVICES
        assert made <= wrote <= made + 5, "each object once, and a few times its status"
        # Each object is looked for before it is made: it might be somebody else's.
        assert (api.calls - calls) / SERVICES <= 2 * made + 5 + 30 / SERVICES
        for each in names:
            clean.mark_pods(each)
        running.settle()
        # At rest: what changes elsewhere costs nothing.
        calls, writes = api.calls, len(running.writes)
        note = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "namespace": "default"}}
        clean.apply(note)
        clean.server.kubectl("delete", "configmap", "mine")
        running.settle()
        assert len(running.writes) == writes
    with Running(clean.server.kubeconfig, once) as fresh:
        fresh.settle()
        assert fresh.writes == []
        assert fresh.controller.api.calls < 150, "a list and a watch of each kind, and discovery; none for a service"
