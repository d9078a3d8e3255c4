# SPDX-License-Identifier: Apache-2.0
"""The Python backend: runs `model.py` files, Triton's class or a `predict` function, each instance in its own process.

    backend -> instance -> process == socket, shared memory == child/channel <- child/main, child/pb_utils
                                           protocol

This folder is the server's side, `child` the model's side, and `protocol` is shared. Queues and batching belong to the
engine.
"""
