# SPDX-License-Identifier: Apache-2.0
"""`headrace models convert`: the command; `test_convert` tests the conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import convert
from headrace.cli.models import models
from headrace.core.errors import InvalidArgument


def test_arguments_are_passed_on_and_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def convert_netdef(source: Path, target: Path, **more: Any) -> convert.Converted:
        given.append((source, target, more))
        if source.name == "bad":
            raise InvalidArgument("operator 3 is not known")
        return convert.Converted(source, target, ("data",), ("prob",), 7, 1234)

    monkeypatch.setattr(convert, "convert_netdef", convert_netdef)
    options = ["--input", "data=-1,4", "--input", "ids=INT64:-1", "--output", "prob", "--overwrite"]
    good = CliRunner().invoke(models, ["convert", "net", "net.onnx", *options])
    assert (good.exit_code, good.output) == (0, "wrote net.onnx: 7 nodes, data -> prob, 1234 bytes\n")
    bad = CliRunner().invoke(models, ["convert", "bad", "net.onnx"])
    assert bad.exit_code == 2 and "error: operator 3 is not known" in bad.output
    more = {"inputs": ["data=-1,4", "ids=INT64:-1"], "outputs": ["prob"], "overwrite": True}
    assert given[0] == (Path("net"), Path("net.onnx"), more)
    assert given[1][2] == {"inputs": (), "outputs": (), "overwrite": False}
