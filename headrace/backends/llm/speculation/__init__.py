# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: draft the next tokens of a sequence cheaply, and let the model verify them in one step.

The scheduler asks a `Drafter` for drafts and puts their tokens behind the sequence's own into the next step. The model
samples after each of them as it would without drafts; a drafted token is accepted if it is the sampled one. So the answers
do not depend on the drafts, only their speed does.
"""
