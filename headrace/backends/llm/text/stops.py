# SPDX-License-Identifier: Apache-2.0
"""Finds the texts that end a choice, across the borders of what arrives. Called by the engine for each choice.

What is shown does not depend on how the text was cut: the stop that is complete first wins, and of those that end at one
place the longest. Only text that could be the beginning of a stop is held back. Knows nothing of tokens.
"""

from __future__ import annotations


class StopTexts:
    """One for each choice."""

    __slots__ = ("_held", "_searches", "_stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop was found: then this was the last of it."""
        searches = self._searches
        if not searches:
            return text, False
        if self._stopped:
            return "", True
        ends = [(end, -search.length) for search in searches if (end := search.find(text))]
        if ends:
            end, length = min(ends)
            self._stopped = True
            whole = self._held + text[:end]
            self._held = ""
            return whole[: len(whole) + length], True
        whole = self._held + text
        open_ = max(search.matched for search in searches)
        if not open_:
            self._held = ""
            return whole, False
        self._held = whole[-open_:]
        return whole[:-open_], False

    def finish(self) -> str:
        """What was held back, at the end of a choice that no stop ended."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One stop: how much of it the text so far ends with (Knuth, Morris and Pratt), so that no text is read twice."""

    __slots__ = ("_back", "_first", "_stop", "length", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._first = stop[0]
        self._back: list[int] = []
        """For each length that matched, the next shorter one that does. Made when first needed."""
        self.length = len(stop)
        self.matched = 0

    def find(self, text: str) -> int:
        """Where in `text` the stop ends for the first time, or 0."""
        matched = self.matched
        # Nearly all text has not even the first character, and `in` sees that at once.
        if not matched and self._first not in text:
            return 0
        stop, back = self._stop, self._back or self._prepared()
        for position, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = back[matched]
            if stop[matched] == character:
                matched += 1
                if matched == self.length:
                    self.matched = 0
                    return position + 1
        self.matched = matched
        return 0

    def _prepared(self) -> list[int]:
        stop, back, matched = self._stop, [0, 0], 0
        for character in stop[1:]:
            while matched and stop[matched] != character:
                matched = back[matched]
            matched += stop[matched] == character
            back.append(matched)
        self._back = back
        return back
