# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans (`tensorrt_plan`), computed on NVIDIA GPUs by TensorRT 10 or newer.

    backend    what the engine calls
    instance   one execution context: a batch of arrays through the GPU and back
    plan       what a plan's engine says of itself, as plain data
    profiles   which optimization profile takes which shapes
    checking   a configuration held against a plan, or filled in from it
    settings   parameters of a configuration, and which file is for which GPU
    shaping    a batch as the engine wants it: arrays, shapes, values of shape tensors
    buffers    memory that grows, on the host and on the GPU
    device     every call of TensorRT and CUDA

All but `device` is plain Python that runs without a GPU. A plan is native code for one kind of GPU: whoever can write
one into the repository runs what they like in the server. Serve only plans that you built or whose maker you trust.
"""
