# SPDX-License-Identifier: Apache-2.0
"""Fleet: what an InferenceService asks for, and which objects a cluster or one machine needs for it.

Documents are plain JSON mappings as a user wrote them, unknown fields kept. What is pure here (words, names, schema,
admission, selection, merging, planning, autoscaling, status) has no I/O and no clock, imports the core alone, never changes
what it is given, and says the same of the same documents always. What speaks to an API server or a disk stands beside it
and decides nothing. On a cluster Kubernetes, Knative, LeaderWorkerSet and KEDA do the work: we write their objects and build
none of them again. On one machine nobody else is there to do it.
"""
