# SPDX-License-Identifier: Apache-2.0
"""Backends: each loads models of one format and computes with them.

`contract` is what the engine asks of a backend, `table` has them by name. Backends do not import each other. No queues, no
batching, no versions and no protocols here.
"""
