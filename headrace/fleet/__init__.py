# SPDX-License-Identifier: Apache-2.0
"""InferenceService resources on Kubernetes or on one machine, and the router in front of them.

What is pure (schema, admission, selection, merging, planning, autoscaling, rollouts, status) has no I/O and no clock.
`cluster` and `local` carry plans out, `agent` downloads models to nodes, `router` is the balancing proxy. On a cluster,
Kubernetes, Knative, LeaderWorkerSet and KEDA do the work: we only write their objects.
"""
