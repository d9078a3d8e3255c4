# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend: plans (`tensorrt_plan`), run on NVIDIA GPUs by TensorRT 10 or newer.

    backend    the entry point: parameters, the plan file of a GPU, checks of a configuration against a plan
    instance   one execution context: a batch of arrays to the GPU and back
    plan       a plan's bindings and optimization profiles, as plain data
    buffers    growing memory, on the host and on the GPU
    device     every call of TensorRT and CUDA

All modules but `device` run without a GPU. A plan is native code for one kind of GPU: it can do whatever the server
can. Serve only plans that you built or whose author you trust.
"""
