# SPDX-License-Identifier: Apache-2.0
"""Execution: concatenate the tensors of a batch, compute it on an instance, split the result into responses.

Runners hold an instance and choose its thread. Queues, and the choice of what is computed when, are in `scheduling`.
"""
