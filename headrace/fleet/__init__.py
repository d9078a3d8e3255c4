# SPDX-License-Identifier: Apache-2.0
"""InferenceService resources on Kubernetes or on one machine, and the router in front of them.

schema, admission, selection, merging, planning, autoscaling, rollouts and status are pure: no I/O, no clock. `cluster` and
`local` carry plans out, `agent` downloads models to nodes, `router` is the load-balancing proxy. On a cluster, Kubernetes,
Knative, LeaderWorkerSet and KEDA do the work: the operator only writes their objects.
"""
