# SPDX-License-Identifier: Apache-2.0
"""Options of `headrace serve` on several machines: the resulting settings, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.serve_settings import KEY_VARIABLE, node_settings, server_settings
from headrace.core.errors import InvalidArgument
from headrace.core.nodes import NodeSettings
from headrace.core.telemetry.progress import silent
from headrace.programs.configuration.resolution import OptionValues, configure

SECRET = "0123456789abcdef0123"
KEY = {KEY_VARIABLE: SECRET}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "10.0.0.7", **KEY}


def given(**options: str) -> OptionValues:
    return configure({name.replace("_", "-"): value for name, value in options.items()}, (), {})


def test_one_machine_has_no_nodes() -> None:
    assert node_settings(given(), {}) == NodeSettings()
    assert node_settings(given(nnodes="1"), LWS) == NodeSettings()
    assert node_settings(given(nnodes="1", node_rank="0"), {}) == NodeSettings()


@pytest.mark.parametrize(
    ("options", "host", "port"),
    [
        ({"master_addr": "10.0.0.7"}, "10.0.0.7", 29500),
        ({"master_addr": "10.0.0.7:400"}, "10.0.0.7", 400),
        ({"master_addr": "head", "master_port": "400"}, "head", 400),
        ({"master_addr": "fd00::7"}, "fd00::7", 29500),
        ({"master_addr": "[fd00::7]:400"}, "fd00::7", 400),
        ({"master_addr": "[fd00::7]"}, "fd00::7", 29500),
    ],
)
def test_options_say_which_machine_this_is(options: dict[str, str], host: str, port: int) -> None:
    settings = node_settings(given(nnodes="2", node_rank="1", node_join_seconds="9", **options), KEY)
    assert settings == NodeSettings(2, 1, host, port, SECRET.encode(), 9.0)


def test_the_environment_says_what_options_do_not() -> None:
    assert node_settings(given(), LWS) == NodeSettings(2, 1, "10.0.0.7", 29500, SECRET.encode())
    settings = node_settings(given(master_addr="10.0.0.8:400"), LWS)
    assert (settings.rank, settings.host, settings.port) == (1, "10.0.0.8", 400)


def test_a_leader_worker_set_without_workers_is_one_machine() -> None:
    """Its leader gets the options of a group."""
    assert node_settings(given(master_addr="10.0.0.7:29500"), {**LWS, "LWS_GROUP_SIZE": "1"}) == NodeSettings()
    with pytest.raises(InvalidArgument, match="--master-addr is for a model on several machines: add --nnodes"):
        node_settings(given(master_addr="10.0.0.7"), {})


def test_on_loopback_the_machines_key_is_used() -> None:
    keys = {node_settings(given(nnodes="2", node_rank=rank, master_addr="127.0.0.1"), {}).key for rank in "01"}
    assert len(keys) == 1
    assert len(keys.pop()) >= 16


def test_a_key_file_is_read_without_a_role(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    options = given(nnodes="2", node_rank="0", master_addr="10.0.0.7", handing_key_file=str(file))
    assert node_settings(options, {}).key == SECRET.encode()
    assert server_settings(options, silent).nodes.key == SECRET.encode()


def test_a_model_on_several_machines_is_not_tried_on_one(tmp_path: Path) -> None:
    settings = server_settings(given(nnodes="2", node_rank="0", master_addr="127.0.0.1"), silent)
    assert settings.engine.repository.trial_load == "never"
    assert server_settings(given(), silent).engine.repository.trial_load == "fetched"


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ({"nnodes": "2"}, KEY, "--node-rank"),
        ({"nnodes": "2", "node_rank": "1"}, KEY, "--master-addr"),
        ({"nnodes": "2", "node_rank": "2", "master_addr": "head"}, KEY, "from 0 to 1"),
        ({"nnodes": "2", "node_rank": "1", "master_addr": "head"}, {}, "must share a key"),
        ({}, {**LWS, KEY_VARIABLE: ""}, "or --nnodes 1, to serve alone although LeaderWorkerSet has started several"),
        ({"nnodes": "2", "node_rank": "1", "master_addr": "head:none"}, KEY, "HOST:PORT"),
        ({"nnodes": "2", "node_rank": "0", "master_addr": "head", "workers": "2"}, KEY, "leave out --workers"),
        ({"nnodes": "2", "node_rank": "0", "master_addr": "head", "role": "decode"}, KEY, "--role"),
        ({"nnodes": "2", "node_rank": "0", "master_addr": "head", "trial_load": "always"}, KEY, "--trial-load"),
        ({"node_rank": "1"}, KEY, "add --nnodes"),
        ({"master_addr": "head"}, {}, "add --nnodes"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, str], environment: Mapping[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        node_settings(given(**options), environment)
