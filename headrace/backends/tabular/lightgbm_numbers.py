# SPDX-License-Identifier: Apache-2.0
"""Checks lines of numbers, those of many trees at once. Called by `lightgbm_text`; knows no model.

A line is so many numbers with one space between them. LightGBM ends the process for one that is none, so each byte is
looked at, together with the one before it: that, and the order of what is left without the digits, is all that the way
numbers are written has to say. It takes a tenth of the time of turning them into numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.backends.contract import Array

LONGEST = 48
"""Of one number, in bytes."""

_OF_NUMBERS = b"0123456789+-.eEinfa "


def check_numbers(lines: Sequence[bytes], counts: Array) -> None:
    """Refuse, with a `ValueError`, what is not so many numbers in each line."""
    text = b" ".join(lines)
    others = _Others(text)
    _check_tokens(others, lines, counts)
    if not (others.are_placed_well() and others.are_in_order()):
        # Infinities, and other ways to write a number that LightGBM itself has no use for.
        _check_each(text)


def whole_of(lines: Sequence[bytes], counts: Array, low: Array, high: Array) -> Array:
    """The numbers of all lines, each within the range of its line; refuses others with a `ValueError`."""
    text = b" ".join(lines)
    others = _Others(text)
    _check_tokens(others, lines, counts)
    if not others.are_placed_well() or not others.are_whole():
        raise _no_numbers()
    numbers = np.fromstring(text, np.int64, sep=" ")
    if numbers.size != counts.sum():
        raise _no_numbers()
    if (numbers < np.repeat(low, counts)).any() or (numbers > np.repeat(high, counts)).any():
        raise _no_numbers()
    return numbers


class _Others:
    """What is no digit in a text, with a space added at its end."""

    def __init__(self, text: bytes) -> None:
        self._bytes = np.frombuffer(text + b" ", np.uint8)
        self._is_digit = (self._bytes - ord("0")) < 10
        self._places = np.flatnonzero(~self._is_digit)
        self._letters = self._bytes[self._places]
        self._is_space = self._letters == ord(" ")

    def spaces(self) -> Array:
        places: Array = self._places[self._is_space]
        return places

    def are_placed_well(self) -> bool:
        """Whether each has before it what it must: a digit, or, for a sign, a space or an exponent's letter."""
        letters = self._letters
        # Before the first is a space, as between the numbers; what the last byte would be is not asked for.
        before = np.where(self._places > 0, self._bytes[self._places - 1], np.uint8(ord(" ")))
        after_exponent = (before | 32) == ord("e")
        after_digit = (before - ord("0")) < 10
        needs_digit = self._is_space | (letters == ord(".")) | ((letters | 32) == ord("e"))
        good = (needs_digit & after_digit) | ((letters == ord("+")) & after_exponent)
        good |= (letters == ord("-")) & (after_exponent | (before == ord(" ")))
        return bool(good.all())

    def are_whole(self) -> bool:
        return bool((self._is_space | (self._letters == ord("-"))).all())

    def are_in_order(self) -> bool:
        """Whether there is at most one point, and at most one exponent after it, in each number."""
        left = self._letters.tobytes().replace(b"E", b"e").replace(b"e-", b"e").replace(b"e+", b"e")
        return not (b".." in left or b"e." in left or b"ee" in left)


def _check_tokens(others: _Others, lines: Sequence[bytes], counts: Array) -> None:
    """Whether each line has so many of them, none too long."""
    ends = others.spaces()
    sizes = np.fromiter(map(len, lines), np.int64, len(lines))
    if (counts < 1).any() or ends.size != counts.sum():
        raise _no_numbers()
    if (ends[np.cumsum(counts) - 1] != np.cumsum(sizes + 1) - 1).any():
        raise _no_numbers()
    if ends[0] > LONGEST or (np.diff(ends) > LONGEST + 1).any():
        raise _no_numbers()


def _check_each(text: bytes) -> None:
    if text.translate(None, _OF_NUMBERS):
        raise _no_numbers()
    # `float` is for its error.
    for number in text.split(b" "):
        float(number)


def _no_numbers() -> ValueError:
    return ValueError("a line of numbers has something else in it, or more or fewer of them than it must")
