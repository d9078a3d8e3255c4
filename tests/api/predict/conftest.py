# SPDX-License-Identifier: Apache-2.0
"""The seed's model, TorchScript of four floats to two, as v1.0.0, behind `/predict`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from predict_server import torch_served

from support.serving import Serving


@pytest.fixture(scope="session")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with torch_served(tmp_path_factory.mktemp("models"), {1: 1.0}) as server:
        yield server
