# SPDX-License-Identifier: Apache-2.0
"""Kinds and fields of OME 1.3 that Headrace does not have, and what to write instead. See decision 0020."""

from __future__ import annotations

_COMPONENT_FIELDS = {
    "autoscalerPolicyRef": "write the policy's settings into autoscaler, beside it",
    "lifecycle": "remove it: pods are replaced as deploymentStrategy says, and containers restart by themselves",
    "servicePortAppProtocols": "remove it",
    "topologyKey": "write affinity or topologySpreadConstraints",
}
OME_ONLY_FIELDS = {
    "spec.rollout": "write canaryTrafficPercent, or the annotations ome.io/rollout-steps: see headrace rollout --help",
    "spec.traffic": "write the routing strategy into spec.router.config",
    "spec.scalingPolicy": "remove it: each component scales by its own autoscaler",
    "spec.model.overlays": "write spec.model.fineTunedWeights",
    "spec.topologyKey": _COMPONENT_FIELDS["topologyKey"],
    **{
        f"spec.{part}.{name}": fix
        for part in ("engine", "decoder", "router")
        for name, fix in _COMPONENT_FIELDS.items()
    },
}
"""Paths of fields, and the next step."""
OME_ONLY_KINDS = {
    "AutoscalerPolicy": "write its settings into the autoscaler of each component that refers to it",
    "RolloutPolicy": "write the annotations ome.io/rollout-steps of each service: see headrace rollout --help",
    "InferenceReplica": "leave it out: OME makes it from an InferenceService",
    "AcceleratorQuota": "write a ResourceQuota",
}
