# SPDX-License-Identifier: Apache-2.0
"""A fleet as its users see it: look at services and models, apply and delete them, move a canary on.

For the verbs `headrace get`, `describe`, `apply`, `delete` and `rollout`. `contract` is what they need of a fleet;
`kubernetes` has it from an API server, and another maker may have it from this machine; `opening` is the place that tells
them apart. Beside that: what is read out of documents for people (`summaries`, `rows`, `advice`, `rollouts`), which is pure.
May not live here: what is printed and how (`cli`), and whatever decides about objects (`planning`, `status`).
"""
