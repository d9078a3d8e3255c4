# SPDX-License-Identifier: Apache-2.0
"""The inference engine: model repository, schedulers, instances, ensembles, cache, statistics, traffic splits.

`dataplane` is what every protocol calls. Knows no HTTP, gRPC, JSON or socket; what a model format needs is in `backends`.
"""
