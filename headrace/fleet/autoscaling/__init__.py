# SPDX-License-Identifier: Apache-2.0
"""How many replicas a load needs. Pure: what was measured and the time are passed in.

Used by the fleet of one machine (`local.scaling`), and by a router that wakes what sleeps (`router.waking`).

    deciding      how many, by Knative's windows
    meter         the samples of a load: requests at once, requests per second, or any other number
    queries       the part of PromQL that is understood here: a text as a tree
    computing     its value, over what replicas tell of themselves
    exposition    what they tell, read

May not live here: who measures, who starts replicas, and clocks.
"""
