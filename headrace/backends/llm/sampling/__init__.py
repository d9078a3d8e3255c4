# SPDX-License-Identifier: Apache-2.0
"""Sampling: params, per-sequence state, logits processors, structured output and the sampler."""
