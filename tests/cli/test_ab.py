# SPDX-License-Identifier: Apache-2.0
"""`headrace ab` against a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from split_planes import SplitPlane
from typer.testing import CliRunner, Result

from headrace.api.admin import Admin
from headrace.cli.ab import ab
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving

pytestmark = pytest.mark.worker("matplotlib")


class Here:
    """A server with one model of three versions, and the program that looks at it."""

    split_plane: SplitPlane
    server: Serving

    async def site(self) -> Site:
        self.split_plane = SplitPlane()
        labels = {"parameters": {"version_labels": "2=v2.0"}}
        for number in (1, 2, 3):
            await self.split_plane.load(number, lambda inputs: {"OUTPUT0": inputs["INPUT0"] * np.float32(2)}, **labels)
        routes = Routes()
        Admin(self.split_plane.traffic).add_to(routes)
        return Site(routes)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(ab, [*arguments, "--url", f"http://127.0.0.1:{self.server.port}"])

    def output_of(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    def infer(self, times: int) -> None:
        async def ask() -> None:
            for _ in range(times):
                await self.split_plane.ask()

        self.server.call(ask)


@pytest.fixture
def here() -> Iterator[Here]:
    here = Here()
    with serving(here.site) as here.server:
        yield here
        here.server.call(here.split_plane.close)


def test_a_split_is_set_reported_and_cleared(here: Here) -> None:
    assert "no model has a split" in here.output_of("list")
    options = ("--sticky-header", "x-user", "--shadow", "3=1", "--rollback-error-rate", "0.05")
    shown = here.output_of("set", "m", "1=0.5", "v2.0=0.5", *options)
    assert "v2.0 (2)" in shown and "1 (baseline)" in shown and "header x-user" in shown
    assert "100% of the requests are mirrored to version 3" in shown
    here.infer(200)
    listed = here.output_of("list")
    assert "50%" in listed and "serving" in listed
    report = here.output_of("report", "m")
    for text in (
        "REQUESTS",
        "Compared with version 1",
        "Fisher's exact",
        "no difference to be seen yet",
        "Mann-Whitney U",
    ):
        assert text in report
    assert "Agreement" in report and "100%" in report
    assert "█" in report
    document: Any = json.loads(here.output_of("report", "m", "--json"))
    assert sum(version["requests"] for version in document["versions"]) == 200
    assert document["split"]["rollback"]["error_rate"] == 0.05
    assert "rolled back" in here.output_of("rollback", "m", "v2.0", "--reason", "complaints")
    assert "complaints" in here.output_of("report", "m")
    assert json.loads(here.output_of("list", "--json"))[0]["model"] == "m"
    assert "newest" in here.output_of("clear", "m")
    assert here.run("report", "m").exit_code == 1


def test_a_report_of_nothing_yet(here: Here) -> None:
    here.output_of("set", "m", "1=90", "2=10")
    report = here.output_of("report", "m")
    assert "nothing to compare yet" in report and "too few to compare" in report and "Latencies" not in report


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("set", "m", "1=0.5"), 1, "sum to 0.5"),
        (("set", "m", "1=0.5", "7=0.5"), 1, "no version '7'"),
        (("set", "m", "1"), 2, "is not VERSION=NUMBER"),
        (("set", "m", "1=x"), 2, "is not VERSION=NUMBER"),
        (("set", "m", "1=1", "1=0"), 2, "is given twice"),
        (("set", "m", "1=1", "--shadow", "2"), 2, "--shadow 2=0.25"),
        (("clear", "m"), 1, "has no split"),
        (("rollback", "m", "2"), 1, "has no split"),
    ],
)
def test_invalid_input_is_reported(here: Here, arguments: tuple[str, ...], code: int, says: str) -> None:
    result = here.run(*arguments)
    assert result.exit_code == code and says in " ".join(result.output.replace("│", " ").split())


def test_a_plot_is_a_png_or_the_reason_why_not(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here.output_of("set", "m", "1=0.5", "2=0.5")
    here.infer(50)
    refused = here.run("report", "m", "--plot", str(tmp_path / "plot.txt"))
    assert refused.exit_code == 2 and "must end in .png" in refused.output
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = here.run("report", "m", "--plot", str(tmp_path / "plot.png"))
    assert refused.exit_code == 2 and "pip install 'headrace[plot]'" in refused.output
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    here.output_of("report", "m", "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
