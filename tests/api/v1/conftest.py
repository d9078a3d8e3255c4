# SPDX-License-Identifier: Apache-2.0
"""A real server with both generations of the old protocol over a folder of models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from v1_site import TrtisSite, make_repository

from support.serving import Serving, serving


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> TrtisSite:
    return TrtisSite(make_repository(tmp_path_factory.mktemp("trtis") / "models"))


@pytest.fixture(scope="module")
def server(site: TrtisSite) -> Iterator[Serving]:
    with serving(site.build) as running:
        yield running
        running.call(site.engine.close, 5)
