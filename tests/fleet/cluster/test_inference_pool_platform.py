# SPDX-License-Identifier: Apache-2.0
"""InferencePool and InferenceObjective on a real API server that checks and keeps what the extension's CRDs do."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/default/inferenceobjectives"


def priorities(site: Any) -> dict[str, int]:
    return {each["metadata"]["name"]: each["spec"]["priority"] for each in site.fetch(OBJECTIVES)["items"]}


def test_a_pool_comes_changes_and_goes_with_the_annotations(clean: Any) -> None:
    from controller_site import Running, until

    model, service = clean.sample("inference-pool")
    with Running(clean.server.kubeconfig) as running:
        clean.apply(model, service)
        running.settle()
        [pool] = clean.fetch(POOLS)["items"]
        assert pool["spec"] == {
            "selector": {"matchLabels": {"ome.io/inferenceservice": "llama-pool", "component": "engine"}},
            "targetPorts": pool["spec"]["targetPorts"],
            "endpointPickerRef": {
                "kind": "Service",
                "name": "llama-pool-picker",
                "port": {"number": 9002},
                "failureMode": "FailClose",
            },
        }
        assert pool["metadata"]["ownerReferences"][0]["kind"] == "InferenceService"
        assert priorities(clean) == {"llama-pool-interactive": 10, "llama-pool-batch": -10}
        for kind in ("services", "serviceaccounts", "configmaps"):
            assert clean.fetch(f"/api/v1/namespaces/default/{kind}/llama-pool-picker")
        picker = clean.fetch("/apis/apps/v1/namespaces/default/deployments/llama-pool-picker")
        before = picker["spec"]["template"]["metadata"]["annotations"]

        changed = copy.deepcopy(service)
        changed["metadata"]["annotations"] = {
            "ome.io/inference-pool": "p2c",
            "ome.io/inference-objectives": "interactive=20",
        }
        clean.apply(changed)
        until(lambda: priorities(clean) == {"llama-pool-interactive": 20})
        picker = clean.fetch("/apis/apps/v1/namespaces/default/deployments/llama-pool-picker")
        assert picker["spec"]["template"]["metadata"]["annotations"] != before, "the picker starts with the new policy"

        clean.server.kubectl("annotate", "isvc", "llama-pool", "ome.io/inference-pool-", "ome.io/inference-objectives-")
        until(lambda: not clean.fetch(POOLS)["items"] and not clean.fetch(OBJECTIVES)["items"])
        running.settle()
        assert not [name for name in clean.children() if "picker" in str(name)]
