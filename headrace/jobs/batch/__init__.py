# SPDX-License-Identifier: Apache-2.0
"""Batch inference: one model over many items, from a folder or a manifest to a file of results.

programs.batch -> model (the model) -> inference (items to results)
               -> sources (the input)
               -> ledger, progress (the results, and which items are done) -> output (where they go)
               -> runner (reads, computes and writes concurrently)
"""
