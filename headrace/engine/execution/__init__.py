# SPDX-License-Identifier: Apache-2.0
"""A batch becomes one computation, and its result becomes answers.

Lives here: joining and cutting tensors, and the runners that hold an instance and choose its thread. May not live here:
queues, or the choice of what is computed when.
"""
