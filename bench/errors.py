# SPDX-License-Identifier: Apache-2.0
"""The error of a measurement that cannot be made or must not be believed."""


class BenchError(Exception):
    """A measurement that cannot be made or must not be believed; the message says what to do about it."""
