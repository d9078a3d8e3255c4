# SPDX-License-Identifier: Apache-2.0
"""`import launched_programs` works from here, and in what is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Before anybody imports it: its tests are those of every driver, and tell what differed.
pytest.register_assert_rewrite("driver_contract")
