# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests are computed next, together with which others, and by which instance.

Lives here: requests on their way, queues, the rules of batching, the schedulers. May not live here: tensors' contents,
threads, files.
"""
