# SPDX-License-Identifier: Apache-2.0
"""Every example of `docs/guides/model-configuration.md` is a configuration that serves.

A block that names no backend is added to the guide's first block.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.check import check_repository
from headrace.engine.repository.settings import RepositorySettings

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guides" / "model-configuration.md"
BLOCKS = re.findall(r"^```(pbtxt|json|yaml)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
WHOLE = re.compile(r"^\W*(backend|platform)\b", re.MULTILINE)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    base = BLOCKS[0][1]
    for number, (language, text) in enumerate(BLOCKS):
        name = "echo" if number == 0 else f"block_{number}"
        (tmp_path / name / "1").mkdir(parents=True)
        whole = text if WHOLE.search(text) else base + text
        (tmp_path / name / f"config.{language}").write_text(whole)
    return tmp_path


def test_the_check_finds_nothing(repository: Path) -> None:
    report = check_repository(repository)
    assert len(report.models) == len(BLOCKS) > 20
    assert [str(problem) for problem in report.problems] == []


def test_every_example_serves(repository: Path) -> None:
    async def states() -> dict[str, tuple[str, str]]:
        settings = RepositorySettings(exit_on_error=False)
        engine = open_engine(EngineSettings(repositories=(repository,), repository=settings))
        await engine.start()
        try:
            index = await engine.plane.index()
        finally:
            await engine.close(5)
        return {entry.name: (entry.state.value if entry.state else "", entry.reason) for entry in index}

    result = asyncio.run(states())
    assert len(result) == len(BLOCKS)
    assert {name: state for name, state in result.items() if state != ("READY", "")} == {}
