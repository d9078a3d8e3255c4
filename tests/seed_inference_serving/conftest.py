# SPDX-License-Identifier: Apache-2.0
"""The models that the seed's examples are tried with; and `import seed_programs` from the tests beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.model_cache import made_once


@pytest.fixture(scope="session")
def seed_models() -> Path:
    """`versions/` for `model.path`, and `repository/` for `headrace serve FOLDER`."""
    from seed_models import make_seed_models

    return made_once(make_seed_models)
