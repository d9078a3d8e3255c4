# SPDX-License-Identifier: Apache-2.0
"""The models that the seed's examples are tried with, made once; and `import seed_programs` from the tests beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def seed_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`versions/` for `model.path`, and `repository/` for `headrace serve FOLDER`."""
    from seed_models import make_seed_models

    return make_seed_models(tmp_path_factory.mktemp("seed"))
