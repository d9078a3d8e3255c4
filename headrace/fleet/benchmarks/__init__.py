# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs: the Job that runs each of them, and its status. Pure.

The controllers of a cluster and of a local fleet call it. `headrace bench` parses its scenarios with `scenarios`, too, and
generates the load in the Job's pod.
"""
