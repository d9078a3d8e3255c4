# SPDX-License-Identifier: Apache-2.0
"""`models check` and a response cache where it has no effect."""

from __future__ import annotations

from pathlib import Path

from headrace.engine.repository.check import check_repository

ONE = """
backend: "identity"
input [{ name: "X" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [1] }]
"""
BOTH = """
platform: "ensemble"
input [{ name: "A" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "B" data_type: TYPE_FP32 dims: [1] }]
ensemble_scheduling { step [{
  model_name: "one" model_version: -1
  input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" }
}] }
response_cache { enable: true }
"""


def test_a_cache_for_an_ensemble_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "one" / "1").mkdir(parents=True)
    (tmp_path / "one" / "config.pbtxt").write_text(ONE)
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text(BOTH)
    report = check_repository(tmp_path)
    assert not report.problems
    (warning,) = report.warnings
    assert (warning.field, warning.line) == ("response_cache.enable", 9)
    assert "models of its steps" in warning.text
