# SPDX-License-Identifier: Apache-2.0
"""Reads the parameters of a configuration, which are text whatever they mean. Called by the settings of each backend."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.errors import InvalidArgument


def number_of(parameters: Mapping[str, str], key: str, default: int, highest: int) -> int:
    """A parameter that is a whole number."""
    text = parameters.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) <= highest):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use a whole number from 0 to {highest}")
    return int(text)
