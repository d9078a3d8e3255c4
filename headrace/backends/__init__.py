# SPDX-License-Identifier: Apache-2.0
"""Backends: each loads models of one format and runs them.

`contract` defines the interface between engine and backend; `table` lists the backends by name. Backends do not import
each other. Queues, batching, versions and protocols belong to the engine.
"""
