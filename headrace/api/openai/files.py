# SPDX-License-Identifier: Apache-2.0
"""`/v1/files`: the input files and results of batches. An upload goes to the disk as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

import orjson

from headrace.api.openai.errors import BadRequest, OpenAiHandler
from headrace.api.openai.file_store import BATCH, FileNotKnown, FileStore, NewFile, check_keep_seconds, file_json
from headrace.api.openai.records import Answers, Record, page_of, parse_page
from headrace.core.errors import ResourceExhausted, TooLarge
from headrace.core.limits import BatchLimits
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, OK_JSON, ResponseHead, parse_query
from headrace.net.http.multipart import MultipartReader, PartHead, PartSink
from headrace.net.http.routes import Routes

FILES, FILE, CONTENT = "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"

_PAGE = 10_000
_FIELD_BYTES = 1024
_FORM_BYTES = 64 * 1024
"""What a form has besides the file, at most."""
_WINDOW_BYTES = 1024 * 1024
"""Received bytes that may wait for the disk."""
_READ_BYTES = 256 * 1024
_NAME_CHARACTERS = 256
_RETRY_SECONDS = 1.0
_DIGITS = re.compile(r"[0-9]{1,9}")
_CONTENT_HEAD = ResponseHead(200, [(CONTENT_TYPE, b"application/octet-stream")], raw=True)
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class Files:
    """Handlers over one store."""

    def __init__(self, store: FileStore, limits: BatchLimits) -> None:
        self._store = store
        self._limits = limits
        self._answers = Answers()
        self._uploads = 0

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        routes.add("POST", FILES, OpenAiHandler(self.create), scope="infer", keeps_data=True, streams_body=True)
        routes.add("GET", FILES, OpenAiHandler(self.list), scope="infer")
        routes.add("GET", FILE, OpenAiHandler(self.show), scope="infer")
        routes.add("DELETE", FILE, OpenAiHandler(self.delete), scope="infer", keeps_data=True)
        routes.add("GET", CONTENT, OpenAiHandler(self.content), scope="infer")

    def create(self, exchange: Exchange) -> None:
        """Handle `POST /v1/files`."""
        get = exchange.head.get
        if (get(b"content-encoding") or b"identity") != b"identity":
            raise BadRequest("", "files are not inflated: send the form without Content-Encoding")
        length = get(b"content-length")
        if length is not None and int(length) > self._limits.file_bytes + _FORM_BYTES:
            raise self._too_large()
        if self._uploads >= self._limits.uploads:
            text = f"{self._uploads} files are being uploaded already: try again in a moment"
            raise ResourceExhausted(text, retry_after_seconds=_RETRY_SECONDS)
        upload = _Upload(exchange, self._store, self._limits.file_bytes, self._too_large)
        self._uploads += 1
        self._answers.spawn(exchange, self._receive(upload))

    def list(self, exchange: Exchange) -> None:
        """Handle `GET /v1/files`."""
        query = parse_query(exchange.head.query)
        page = parse_page(query, limit=_PAGE, most=_PAGE)
        caller, purpose = exchange.caller, query.get("purpose", "")
        self._answers.in_thread(exchange, lambda: page_of(self._store.files_of(caller, purpose), page, file_json))

    def show(self, exchange: Exchange) -> None:
        """Handle `GET /v1/files/{id}`."""
        find = partial(self._store.find, exchange.params[0], exchange.caller)
        self._answers.in_thread(exchange, lambda: file_json(find()))

    def delete(self, exchange: Exchange) -> None:
        """Handle `DELETE /v1/files/{id}`."""
        file_id, caller = exchange.params[0], exchange.caller

        def remove() -> Record:
            self._store.remove(file_id, caller)
            return {"id": file_id, "object": "file", "deleted": True}

        self._answers.in_thread(exchange, remove)

    def content(self, exchange: Exchange) -> None:
        """Handle `GET /v1/files/{id}/content`."""
        self._answers.spawn(exchange, self._send_content(exchange, exchange.params[0], exchange.caller))

    async def _receive(self, upload: _Upload) -> None:
        try:
            await upload.run()
        finally:
            self._uploads -= 1

    async def _send_content(self, exchange: Exchange, id: str, caller: str) -> None:
        record = await asyncio.to_thread(self._store.find, id, caller)
        try:
            file = await asyncio.to_thread(self._store.content(id).open, "rb")
        except FileNotFoundError:  # it was deleted meanwhile
            raise FileNotKnown(id) from None
        with file:
            await send_file(exchange, file, record["bytes"])

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the file has more than {self._limits.file_bytes} bytes: split it into several batches")


async def send_file(exchange: Exchange, file: BinaryIO, size: int) -> None:
    """Answer with the content of a file, as fast as the client reads it."""
    writable = asyncio.Event()
    exchange.on_writable = exchange.on_disconnect = writable.set
    exchange.start(_CONTENT_HEAD, ((b"content-length", b"%d" % size),))
    while not exchange.closed and (piece := await asyncio.to_thread(file.read, _READ_BYTES)):
        writable.clear()
        if not exchange.send(piece) and not exchange.closed:
            await writable.wait()
    exchange.finish()


class _Upload:
    """One form that arrives."""

    def __init__(
        self, exchange: Exchange, store: FileStore, most_bytes: int, too_large: Callable[[], TooLarge]
    ) -> None:
        self._exchange = exchange
        self._store = store
        self._most_bytes = most_bytes
        self._too_large = too_large
        self._reader = MultipartReader(exchange.head.get(b"content-type") or b"", self._open_part)
        self._file: NewFile | None = None
        self._filename = ""
        self._fields: dict[str, bytes] = {}
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._received = 0
        self._ended = False
        self._wake = asyncio.Event()
        exchange.on_body = self._on_body
        exchange.on_body_end = self._on_body_end
        exchange.on_disconnect = self._wake.set

    async def run(self) -> None:
        """Read the form and answer; raise what is wrong with it."""
        exchange = self._exchange
        try:
            while not self._ended or self._pieces:
                await self._wake.wait()
                self._wake.clear()
                if exchange.closed:
                    return
                pieces, self._pieces = self._pieces, []
                self._waiting_bytes = 0
                await asyncio.to_thread(self._read, pieces)
                exchange.resume_body()
            record = await asyncio.to_thread(self._keep)
            self._file = None
            exchange.respond(OK_JSON, orjson.dumps(file_json(record)))
        finally:
            if self._file is not None:
                self._file.discard()

    def _on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        self._wake.set()
        if self._waiting_bytes > _WINDOW_BYTES:
            self._exchange.pause_body()

    def _on_body_end(self) -> None:
        self._ended = True
        self._wake.set()

    def _read(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._received += len(piece)
            if self._received > self._most_bytes + _FORM_BYTES:
                raise self._too_large()
            self._reader.feed(piece)

    def _open_part(self, head: PartHead) -> PartSink:
        if head.name == "file":
            if self._file is not None:
                raise BadRequest("file", "may be given once")
            self._filename = _plain_name(head.filename or "")
            self._file = self._store.begin()
            return partial(self._write, self._file)
        if head.name not in _FIELDS:
            return _ignore
        self._fields[head.name] = b""
        return partial(self._add_to_field, head.name)

    def _write(self, file: NewFile, content: bytes) -> None:
        if file.size + len(content) > self._most_bytes:
            raise self._too_large()
        file.write(content)

    def _add_to_field(self, name: str, content: bytes) -> None:
        value = self._fields[name] + content
        if len(value) > _FIELD_BYTES:
            raise BadRequest(name, f"must have at most {_FIELD_BYTES} bytes")
        self._fields[name] = value

    def _keep(self) -> Record:
        self._reader.finish()
        values = {name: value.decode(errors="replace") for name, value in self._fields.items()}
        purpose = values.get("purpose")
        if purpose is None:
            raise BadRequest("purpose", "is missing: send 'batch'")
        if purpose != BATCH:
            raise BadRequest("purpose", f"{purpose[:64]!a} is not served here: only files for 'batch' are kept")
        if self._file is None:
            raise BadRequest("file", "is missing")
        if not self._file.size:
            raise BadRequest("file", "is empty")
        keep_seconds = None
        if len(values) > 1:
            seconds = values.get("expires_after[seconds]", "")
            number = int(seconds) if _DIGITS.fullmatch(seconds) else None
            keep_seconds = check_keep_seconds("expires_after", values.get("expires_after[anchor]"), number)
        return self._store.keep(self._file, self._exchange.caller, self._filename, purpose, keep_seconds=keep_seconds)


def _plain_name(filename: str) -> str:
    """Return the last part of a file's name: it is shown, and never a path here."""
    return re.split(r"[/\\]", filename)[-1][:_NAME_CHARACTERS] or "file"


def _ignore(content: bytes) -> None:
    """Receive a field that means nothing here."""
