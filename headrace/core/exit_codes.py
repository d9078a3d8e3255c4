# SPDX-License-Identifier: Apache-2.0
"""The exit codes that a program's parent, or who wrote the line that started it, acts on."""

from __future__ import annotations

BAD_CONFIGURATION = 2
"""What the program was told is wrong, and would be so again: there is no use in starting it once more as it is."""
