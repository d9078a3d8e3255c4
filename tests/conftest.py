# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

# `import serving` works from every test folder: it is a tool of the tests, not a package of the product.
sys.path.insert(0, str(Path(__file__).parent))
