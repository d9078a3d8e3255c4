# SPDX-License-Identifier: Apache-2.0
"""Backends: each can load models of one format and compute with them.

Lives here: the contract (`contract`), the table of names (`table`), and one module or folder per backend, which know
nothing of each other. May not live here: queues, batching, versions, protocols.
"""
