# SPDX-License-Identifier: Apache-2.0
"""YAML files with limits: what is refused before it costs time or memory, and what is read as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.cli.router_settings import router_settings
from headrace.core.errors import InvalidArgument
from headrace.core.yaml_loader import (
    MAX_DEPTH,
    YamlLimitExceeded,
    compose_yaml,
    load_yaml,
    yaml_error_line,
    yaml_error_reason,
)


def levels(first: str, level: str, count: int) -> str:
    """A text in which each line repeats the line before ten times."""
    lines = [first]
    for number in range(1, count):
        lines.append(level.format(n=number, before=",".join([f"*a{number - 1}"] * 10)))
    return "\n".join(lines)


BOMBS = {
    "aliases": levels("a0: &a0 [x]", "a{n}: &a{n} [{before}]", 12),
    "merges": levels("a0: &a0 {k0: v}", "a{n}: &a{n} {{<<: [{before}], k{n}: v}}", 12),
    "deep lists": "[" * 10_000,
    "deep mappings": "{a: " * 10_000,
    "keys of keys": "? " * 10_000,
    "lists in a line": "- " * 10_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_its_line(name: str) -> None:
    for read in (load_yaml, compose_yaml):
        with pytest.raises(YamlLimitExceeded) as error:
            read(BOMBS[name])
        assert yaml_error_line(error.value) is not None
        assert yaml_error_reason(error.value, "no").startswith("more than ")


def test_aliases_and_merges_are_read() -> None:
    text = "a: &a {b: 1, c: [2]}\nd: *a\ne: {<<: *a, b: 3}\n"
    assert load_yaml(text) == {"a": {"b": 1, "c": [2]}, "d": {"b": 1, "c": [2]}, "e": {"b": 3, "c": [2]}}
    assert load_yaml("") is None
    assert load_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)


@pytest.mark.parametrize(
    "text", ["a: !!python/object/apply:os.system [x]", "a: *unknown", "a: 'x", "- a\nb: c", "a\n---\nb"]
)
def test_what_is_not_plain_yaml_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as error:
        load_yaml(text)
    assert yaml_error_reason(error.value, "not YAML") == "not YAML"


@pytest.mark.parametrize("name", BOMBS)
def test_a_router_refuses_one_in_its_configuration(name: str, tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(BOMBS[name])
    with pytest.raises(InvalidArgument, match=r"router.yaml:\d+: more than "):
        router_settings({}, str(path))
