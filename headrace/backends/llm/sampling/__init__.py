# SPDX-License-Identifier: Apache-2.0
"""From logits to the next tokens: what each row asks for, the sampler, log-probabilities, constrained output."""
