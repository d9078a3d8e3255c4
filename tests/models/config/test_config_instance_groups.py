# SPDX-License-Identifier: Apache-2.0
"""A configuration may come from far away: it must not be able to ask for a million processes, or warm up for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.models.config.completion import complete
from headrace.models.config.drafts import draft_from_json
from headrace.models.config.problems import ConfigError


def test_the_number_of_instances_has_an_end(tmp_path: Path) -> None:
    def finished(count: int) -> int:
        text = {
            "backend": "identity",
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
            "instance_group": [{"count": count, "kind": "KIND_CPU"}],
        }
        return complete(draft_from_json(tmp_path / "m", json.dumps(text)), None).instance_groups[0].count

    assert finished(1024) == 1024
    with pytest.raises(ConfigError, match=r"instance_group.count: .* has count 1025; write 1024 or less"):
        finished(1025)


def test_warming_up_has_an_end(tmp_path: Path) -> None:
    def finished(count: int) -> int:
        tensor = {"data_type": "TYPE_FP32", "dims": [1]}
        text = {
            "backend": "identity",
            "input": [{"name": "IN", **tensor}],
            "output": [{"name": "OUT", **tensor}],
            "model_warmup": [{"name": "w", "count": count, "inputs": {"IN": {**tensor, "zero_data": True}}}],
        }
        return complete(draft_from_json(tmp_path / "m", json.dumps(text)), None).warmups[0].count

    assert finished(10_000) == 10_000
    with pytest.raises(ConfigError, match=r"model_warmup.count: warm-up 'w' is to be computed 10001 times"):
        finished(10_001)
