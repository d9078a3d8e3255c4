# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: one model over several processes (ranks), each with a shard of every layer and of the KV cache.

sharding         which part of each weight a rank has; what cannot be sharded, refused by name
shard_reader     reads these parts from safetensors files
parallel_layers  layers whose results are summed or joined over the ranks
communicator     the collective operations, by torch.distributed: gloo on CPUs, NCCL on GPUs
loading          builds the sharded model of a rank
link, step_codec the channel from the first rank to the others, and the messages that tell them of each step
group            starts and supervises the ranks, and restarts them; `runner` computes steps with them
rank_stub, rank  the process of a rank

The first rank lives in the server's process, where the scheduler is. Nothing here pickles: what goes between processes is
JSON and arrays of integers.
"""
