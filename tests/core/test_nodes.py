# SPDX-License-Identifier: Apache-2.0
"""Which node of how many this is, by the environment of LeaderWorkerSet, torchrun and Slurm."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.core.errors import InvalidArgument
from headrace.core.nodes import NodeEnvironment, first_host, node_environment

LWS = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "chat-0.chat.default"}
TORCHRUN = {
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29400",
}
BY_HAND = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "head"}
SLURM = {
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (LWS, NodeEnvironment(3, 2, "chat-0.chat.default", None, "LeaderWorkerSet")),
        (TORCHRUN, NodeEnvironment(2, 1, "10.0.0.7", 29400, "torchrun")),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            NodeEnvironment(2, 1, "10.0.0.7", 29401, "torchrun"),
        ),
        (BY_HAND, NodeEnvironment(2, 0, "head", None, "torchrun")),
        (SLURM, NodeEnvironment(2, 1, "gpu07", None, "Slurm")),
        (
            {**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "10001"},
            NodeEnvironment(2, 1, "10.0.0.7", 10001, "Slurm"),
        ),
        ({**SLURM, **LWS}, NodeEnvironment(3, 2, "chat-0.chat.default", None, "LeaderWorkerSet")),
    ],
    ids=[
        "LeaderWorkerSet",
        "torchrun",
        "torchrun's own store",
        "variables",
        "Slurm",
        "Slurm with an address",
        "two of them",
    ],
)
def test_the_environment_says_which_node_this_is(environment: Mapping[str, str], found: NodeEnvironment) -> None:
    assert node_environment(environment) == found


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**LWS, "LWS_GROUP_SIZE": "1"},
        {**LWS, "LWS_LEADER_ADDRESS": ""},
        {**BY_HAND, "NODE_RANK": "first"},
        {"NNODES": "2", "NODE_RANK": "1"},
        {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu[07-08]"},
        {**SLURM, "SLURM_STEP_NUM_NODES": "1"},
    ],
    ids=["nothing", "one", "no leader", "no number", "no address", "a batch script without srun", "a step on one node"],
)
def test_a_server_is_alone_if_the_environment_does_not_say_otherwise(environment: Mapping[str, str]) -> None:
    assert node_environment(environment) is None


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node 1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "--ntasks-per-node=1"),
    ],
)
def test_several_servers_on_a_node_are_refused(environment: Mapping[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        node_environment(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[3,5-9],big1", "gpu3"),
        ("rack2-gpu[003-010].cluster.org,big", "rack2-gpu003.cluster.org"),
        ("a,b", "a"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
