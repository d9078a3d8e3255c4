# SPDX-License-Identifier: Apache-2.0
"""What the tests of the repository share."""

from __future__ import annotations

import sys
from pathlib import Path

# `import repository_fakes` works from here: a tool of these tests, as `serving` is of all.
sys.path.insert(0, str(Path(__file__).parent))
