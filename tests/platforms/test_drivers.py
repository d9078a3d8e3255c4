# SPDX-License-Identifier: Apache-2.0
"""A platform's name and settings as a driver."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.core.errors import InvalidArgument
from headrace.platforms.drivers import PLATFORMS, DriverOptions, create_driver, parse_settings, recorded_settings


@dataclass(frozen=True)
class Settings:
    partition: str = ""
    account: str | None = None
    seconds: float = 1.0
    count: int = 1
    keep: bool = False
    folder: Path | None = None
    names: tuple[str, ...] = ()


def test_texts_are_read_as_the_types_of_the_settings() -> None:
    given = {
        "partition": "a b",
        "account": "x",
        "seconds": "2.5",
        "count": "3",
        "keep": "Yes",
        "folder": "/x",
        "names": "a,b",
    }
    assert Settings(**parse_settings(Settings, given, "slurm")) == Settings(
        "a b", "x", 2.5, 3, True, Path("/x"), ("a", "b")
    )
    assert parse_settings(Settings, {"count": 4}, "slurm") == {"count": 4}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("nodes", "1", "it has account, count"), ("count", "many", "not a number"), ("keep", "perhaps", "true or false")],
)
def test_settings_that_are_not_known_or_wrong_are_named(name: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_settings(Settings, {name: value}, "slurm")


@pytest.mark.parametrize("name", ["", "docker", "local-docker; rm -rf /", "Process", "\n"])
def test_a_platform_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="use one of process, local-docker, slurm"):
        create_driver(name, DriverOptions(tmp_path))


def test_all_six_platforms_have_a_driver(tmp_path: Path) -> None:
    assert len(PLATFORMS) == 6
    given = {"slurm": {"partition": "debug"}, "lepton": {"resource_shape": "gpu.a10"}}
    environ = {"LEPTON_WORKSPACE_ID": "w", "LEPTON_AUTH_TOKEN": "t", "BREV_API_TOKEN": "b", "PATH": "/usr/bin"}
    for platform in PLATFORMS:
        driver = create_driver(platform, DriverOptions(tmp_path, environ, given.get(platform, {})))
        assert driver.name == platform
        assert driver.place


def test_what_a_driver_was_made_with_is_recorded_and_its_secrets_are_not(tmp_path: Path) -> None:
    environ = {"SLURM_PARTITION": "gpu", "SLURM_HOSTNAME": "a,b", "NGC_KEY": "nvapi-secret", "DOCKER_HOST": "tcp://x:1"}
    options = DriverOptions(tmp_path, environ, {"cpus": "4"})
    created = recorded_settings("slurm", options)
    assert created == {"partition": "gpu", "hosts": ["a", "b"], "cpus": 4}
    assert recorded_settings("slurm", DriverOptions(tmp_path, {}, json.loads(json.dumps(created)))) == created
    assert recorded_settings("local-docker", DriverOptions(tmp_path, environ)) == {"host": "tcp://x:1"}
    assert recorded_settings("process", options) == {}
    with pytest.raises(InvalidArgument, match="registry-key is secret"):
        create_driver("local-docker", DriverOptions(tmp_path, {}, {"registry-key": "nvapi-x"}))
    assert recorded_settings("kubernetes", DriverOptions(tmp_path, {}, {"node_selector": "a=b,c=d"})) == {
        "node_selector": {"a": "b", "c": "d"}
    }


def test_the_process_driver_has_no_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no setting 'partition'"):
        create_driver("process", DriverOptions(tmp_path, {}, {"partition": "x"}))
