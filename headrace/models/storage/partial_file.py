# SPDX-License-Identifier: Apache-2.0
"""The file that `fetching` writes: it gets its name when all has come. With a journal, what was cut off can be continued.

A server that names an ETag or a time of change is asked for the rest, on the condition that it still has the same; one that
has another sends all of it anew. Bytes of an earlier boot are not believed, as in `journal`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.core.errors import Cancelled, Unavailable
from headrace.models.storage.journal import boot
from headrace.models.storage.problems import DiskFull

_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class PartialFile:
    """What will be the file `to`."""

    def __init__(self, to: Path, journal: Path | None) -> None:
        self._to = to
        self._journal = journal
        self._part = to.with_name(f".fetch-part-{to.name}")
        self._mark = self._read_mark()

    def asked(self) -> dict[str, str]:
        """The headers that ask for the rest; none if there is nothing to continue."""
        size = self._size()
        return {"Range": f"bytes={size}-", "If-Range": self._mark} if self._mark and size else {}

    def begins_at(self, answer: http.client.HTTPResponse) -> int | None:
        """Where an answer begins in the file; None if it is not the rest that was asked for."""
        if answer.status != http.client.PARTIAL_CONTENT:
            return 0 if answer.status == http.client.OK else None
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        asked = self.asked()
        return int(found[1]) if asked and found and int(found[1]) == self._size() else None

    def forget(self) -> None:
        """Nothing of it is of use."""
        self._mark = ""
        self._part.unlink(missing_ok=True)
        if self._journal is not None:
            self._journal.unlink(missing_ok=True)

    @contextlib.contextmanager
    def written(self, answer: http.client.HTTPResponse, start: int) -> Iterator[IO[bytes]]:
        """The file, open for what comes. It goes away unless all is written, or it can be continued."""
        mark = self._mark if start else _mark_of(answer)
        if self._journal is None:
            handle, name = tempfile.mkstemp(prefix=".fetch-", dir=self._to.parent)
            path, file = Path(name), os.fdopen(handle, "wb")
        else:
            if not start:
                self.forget()
                self._journal.write_text(json.dumps({"mark": mark, "boot": boot()}))
            path, file = self._part, self._part.open("ab" if start else "wb")
        try:
            with file:
                yield file
            path.replace(self._to)
        except BaseException as error:
            continued = isinstance(error, Unavailable | Cancelled | OSError) and not isinstance(error, DiskFull)
            if self._journal is None or not mark or not continued:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def _size(self) -> int:
        try:
            return self._part.stat().st_size
        except OSError:
            return 0

    def _read_mark(self) -> str:
        try:
            said = json.loads(self._journal.read_text()) if self._journal is not None else {}
        except (OSError, ValueError):
            return ""
        return str(said.get("mark", "")) if isinstance(said, dict) and said.get("boot") == boot() else ""


def _mark_of(answer: http.client.HTTPResponse) -> str:
    """By what the server will know whether it still has the same; "" if it does not say, or only about."""
    etag = answer.headers.get("ETag", "").strip()
    if etag:
        return etag if etag.startswith('"') and etag.isprintable() else ""
    changed = answer.headers.get("Last-Modified", "").strip()
    return changed if changed.isprintable() else ""
