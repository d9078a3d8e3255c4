# SPDX-License-Identifier: Apache-2.0
"""The Python backend: runs `model.py` files, written for Triton or with one `predict`, each instance in its own process.

    backend -> instance -> process == socket, shared memory == child/channel <- child/main, child/pb_utils
                                     frames, arena, packing

Lives here: the parent's side (this folder), the child's side (`child`), and what both speak (`frames`, `arena`,
`packing`). May not live here: what a request means, queues, batching.
"""
