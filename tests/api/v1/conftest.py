# SPDX-License-Identifier: Apache-2.0
"""A real server with both generations of the old protocol over a folder of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serving import Serving, serving

sys.path.insert(0, str(Path(__file__).parent))

from trtis import TrtisSite, make_repository


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> TrtisSite:
    return TrtisSite(make_repository(tmp_path_factory.mktemp("trtis") / "models"))


@pytest.fixture(scope="module")
def server(site: TrtisSite) -> Iterator[Serving]:
    with serving(site.build) as running:
        yield running
        running.call(site.engine.close, 5)
