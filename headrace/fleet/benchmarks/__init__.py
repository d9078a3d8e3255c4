# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs: the Job that each of them becomes, and what its state says of it. Pure.

`cluster.benchmarking` and `local.benchmarking` call it with what they see, and write what it returns. `scenarios` is also
what the command line of `headrace bench` is read with, so that both take the same. May not live here: how load is made,
which is `loadtest`'s, in the Job's pod.
"""
