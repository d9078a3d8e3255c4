# SPDX-License-Identifier: Apache-2.0
"""Raised anywhere in this folder, caught by __main__.py and runs.py: why something could not be measured."""


class BenchError(Exception):
    """A measurement that cannot be made or must not be believed; the message says what to do about it."""
