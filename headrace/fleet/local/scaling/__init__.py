# SPDX-License-Identifier: Apache-2.0
"""Replicas by load, above one: what HorizontalPodAutoscalers, KEDA and their metrics servers do in a cluster.

    aims          pure: what an autoscaler of a plan asks for
    requests      what the routers of this machine see: requests at once, and that came
    usage         what processes use: cores and memory, by /proc
    metrics       what replicas tell of themselves, for queries
    keeping       one workload: its samples, what is decided of them, and in which words
    autoscaling   the loop: looks at those who may have more or fewer, and sleeps where there are none

How many a load needs is said by `fleet.autoscaling`. From one to zero and back is the routers' (`router.waking`).
"""
