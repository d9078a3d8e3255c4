# SPDX-License-Identifier: Apache-2.0
"""KV transfer: which clients may fetch pages, and what hostile bytes on that socket can do.

The store in a folder of shared memory, the sender on its port and the taker, all real; no model is needed. What becomes of a
request whose pages do not come is in `tests/backends/llm/test_llm_kv_transfer.py`.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from bad_inputs import NAMES
from hypothesis import given
from hypothesis import strategies as some

from headrace.backends.llm.kv_transfer import sender
from headrace.backends.llm.kv_transfer.page_store import PageStore
from headrace.backends.llm.kv_transfer.receiver import TransferError, fetch_pages
from headrace.backends.llm.kv_transfer.sender import (
    EXPIRED,
    MAGIC,
    OK,
    REFUSED,
    REQUEST,
    RESPONSE,
    VERSION,
    PageSender,
    request_proof,
    response_proof,
)
from headrace.core.errors import FailedPrecondition
from headrace.core.fleet_key import user_folder
from headrace.core.kv_transfer import MAX_TOKEN_CHARACTERS, InvalidTransferToken, TransferToken, signature
from support.waiting import eventually

KEY = b"the key of this fleet, 16 or more"
NONCE = b"n" * 16
PAGES, PAGE = 4, 1000
SECRET = b"secret page " * 400


class Prefill(NamedTuple):
    sender: PageSender
    store: PageStore
    id: bytes
    folder: Path

    def offer(self, **changes: Any) -> TransferToken:
        members = {
            "id": self.id.hex(), "model": "m", "digest": "d", "pages": PAGES, "page_bytes": PAGE, "file": "",
            "host": "127.0.0.1", "port": self.sender.port, "expires": 1e10,
        }  # fmt: skip
        return TransferToken(**{**members, **changes})


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[Prefill]:
    folder = user_folder(tmp_path)
    store = PageStore(folder, max_bytes=1 << 20, seconds=1e9)
    kept = store.put([memoryview(SECRET[: PAGES * PAGE])], PAGES * PAGE, PAGES, 0.0)
    sender = PageSender(store, KEY, "127.0.0.1", 0, clock=lambda: 0.0)
    try:
        yield Prefill(sender, store, bytes.fromhex(kept.id), folder)
    finally:
        sender.close()
        store.close()


def send_and_read(port: int, *pieces: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        reported = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(65536):
                reported += received
        except OSError:
            pass  # it was refused before it was read
        return reported


def question(id: bytes, first: int = 0, count: int = PAGES, *, key: bytes = KEY, **changes: Any) -> bytes:
    proof = changes.get("proof") or request_proof(key, id, first, count, NONCE)
    return REQUEST.pack(changes.get("magic", MAGIC), changes.get("version", VERSION), id, first, count, NONCE, proof)


def still_gives(prefill: Prefill) -> None:
    reported = send_and_read(prefill.sender.port, question(prefill.id))
    status, length, proof = RESPONSE.unpack(reported[: RESPONSE.size])
    assert (status, length) == (OK, PAGES * PAGE)
    assert proof == response_proof(KEY, OK, length, NONCE)
    assert reported[RESPONSE.size :] == SECRET[: PAGES * PAGE]


def test_nothing_without_the_key(prefill: Prefill) -> None:
    right = question(prefill.id)
    other_purpose = bytes.fromhex(signature(KEY, b"give", prefill.id, b"0", b"%d" % PAGES, NONCE))
    for asked in (
        question(prefill.id, key=b"another key of 16 bytes"),
        question(prefill.id, key=b"x" * 16, proof=bytes(32)),
        question(prefill.id, proof=other_purpose),  # what a prefill signs is no proof of who asks
        question(prefill.id, magic=b"HTTP"),
        question(prefill.id, version=2),
        right[:-1] + bytes([right[-1] ^ 1]),
        right[:21] + struct.pack(">I", 1) + right[25:],  # another first page than was signed
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 9,
        b"\x16\x03\x01" + bytes(200),
        bytes(REQUEST.size),
        b"\xff" * 10_000,
        right[:-1],
        b"",
    ):
        reported = send_and_read(prefill.sender.port, asked)
        assert reported == b"" or RESPONSE.unpack(reported[: RESPONSE.size])[:2] == (REFUSED, 0), asked[:40]
        assert b"secret" not in reported
    still_gives(prefill)


@pytest.mark.parametrize(
    ("first", "count"), [(0, PAGES + 1), (PAGES, 1), (2**32 - 1, 1), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1)]
)
def test_nothing_beyond_the_pages_of_a_prompt(prefill: Prefill, first: int, count: int) -> None:
    reported = send_and_read(prefill.sender.port, question(prefill.id, first, count))
    assert RESPONSE.unpack(reported)[:2] == (EXPIRED, 0)


def test_pages_are_given_once(prefill: Prefill) -> None:
    """A question that somebody wrote down and sends again finds nothing."""
    still_gives(prefill)
    eventually(
        lambda: RESPONSE.unpack(send_and_read(prefill.sender.port, question(prefill.id))[: RESPONSE.size])[0] == EXPIRED
    )
    assert not list((prefill.folder / prefill.store.name).glob("[0-9a-f]*"))


def test_silent_strangers_use_up_no_descriptors_and_are_disconnected(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those who say it a byte at a time: the question as a whole has to come in time."""
    monkeypatch.setattr(sender, "_REQUEST_SECONDS", 1.0)

    def accepted() -> int:
        result = psutil.Process().net_connections(kind="tcp")
        return sum(item.laddr.port == prefill.sender.port and item.status != psutil.CONN_LISTEN for item in result)

    strangers = [socket.create_connection(("127.0.0.1", prefill.sender.port), 60) for _ in range(60)]
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            for sock in strangers[:8]:
                try:
                    sock.send(b"H")
                except OSError:
                    pass

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        eventually(lambda: accepted() >= 8)
        for _ in range(10):
            assert accepted() <= 8
        still_gives(prefill)  # after a while: those before it in the line were sent away
    finally:
        stop.set()
        thread.join()
        for stranger in strangers:
            stranger.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server in place of a prefill, which answers one decoder."""

    def serve() -> None:
        with listening.accept()[0] as connection:
            try:
                connection.settimeout(60)
                answer(connection)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            thread.join(60)


def answer(status: int, length: int, data: bytes = b"", *, key: bytes = KEY) -> Callable[[socket.socket], None]:
    def give(connection: socket.socket) -> None:
        nonce = REQUEST.unpack(connection.recv(REQUEST.size, socket.MSG_WAITALL))[5]
        connection.sendall(RESPONSE.pack(status, length, response_proof(key, status, length, nonce)) + data)

    return give


def drip(connection: socket.socket) -> None:
    answer(OK, PAGES * PAGE)(connection)
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


WRONG: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "another key": (answer(OK, PAGES * PAGE, bytes(PAGES * PAGE), key=b"another key of 16 bytes"), "refused"),
    "an old answer": (lambda sock: sock.sendall(RESPONSE.pack(OK, 1, response_proof(KEY, OK, 1, NONCE))), "refused"),
    "more than was asked for": (answer(OK, 2**63, b"x" * 100_000), "refused"),
    "less than was asked for": (answer(OK, 1, b"x"), "refused"),
    "no such status": (answer(77, PAGES * PAGE, bytes(PAGES * PAGE)), "refused"),
    "gone": (answer(EXPIRED, 0), "gone"),
    "an end in the middle": (answer(OK, PAGES * PAGE, b"x" * 10), "unreachable"),
    "nothing": (lambda sock: None, "unreachable"),
    "HTTP": (lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100)), "refused"),
    "a byte at a time": (drip, "timeout"),
}


@pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=list(WRONG))
def test_a_decoder_accepts_only_what_it_requested_from_any_peer(
    prefill: Prefill, wrong: Callable[[socket.socket], None], reason: str
) -> None:
    with answering(wrong) as port:
        seconds = 0.5 if reason == "timeout" else 60.0
        with pytest.raises(TransferError) as refused:
            fetch_pages(prefill.offer(port=port), 0, memoryview(bytearray(PAGES * PAGE)), prefill.folder, KEY, seconds)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "name", [*NAMES.values(), "../../canary", "a/../../../canary", "/etc/passwd", "a/" + "0" * 31, "a/b/" + "0" * 32]
)
def test_a_ticket_names_no_file_elsewhere(prefill: Prefill, name: str) -> None:
    """Not even a ticket that is signed: servers of other users, and of other versions, may have the key, too."""
    below = [] if name == "--help" else [{"file": f"{name}/{'0' * 32}"}]  # a folder may be called that
    for changes in ({"file": name}, *below, {"id": name}, {"host": f"127.0.0.1/{name}"}):
        ticket = prefill.offer(**changes).signed(KEY)
        with pytest.raises(InvalidTransferToken):
            TransferToken.parse(ticket, KEY, 0.0)


def test_a_link_in_the_folder_is_not_followed(prefill: Prefill, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_bytes(bytes(PAGES * PAGE))
    place = prefill.folder / prefill.store.name / ("0" * 32)
    place.symlink_to(canary)
    offer = prefill.offer(file=f"{prefill.store.name}/{'0' * 32}", port=0)
    with pytest.raises(TransferError, match="no longer in shared memory"):
        fetch_pages(offer, 0, memoryview(bytearray(PAGES * PAGE)), prefill.folder, KEY, 1.0)
    assert canary.exists()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / f"headrace-handing-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(FailedPrecondition, match="not private to this user"):
        user_folder(tmp_path)


@pytest.mark.parametrize("number", [-1, 2**50, 2**64, 1.5, True, None, "1", [1], 10**400])
def test_numbers_of_a_ticket(prefill: Prefill, number: Any) -> None:
    for name in ("pages", "page_bytes", "port", "expires"):
        if name == "expires" and number != "1" and number is not None and number != [1]:
            continue  # any number is a time
        try:
            ticket = prefill.offer(**{name: number}).signed(KEY)
        except TypeError:
            continue  # larger than JSON's numbers are here
        with pytest.raises(InvalidTransferToken):
            TransferToken.parse(ticket, KEY, 0.0)


@given(some.one_of(some.text(), some.text("abcXYZ019-_.=", max_size=MAX_TOKEN_CHARACTERS + 1)))
def test_any_text_is_a_ticket_or_none(text: str) -> None:
    with pytest.raises(InvalidTransferToken):
        TransferToken.parse(text, KEY, 0.0)


@given(some.recursive(some.none() | some.booleans() | some.integers(-(2**63), 2**63) | some.text(), some.lists))
def test_any_document_that_is_signed_is_a_ticket_or_none(document: Any) -> None:
    from base64 import urlsafe_b64encode

    import orjson

    try:
        written = urlsafe_b64encode(orjson.dumps(document)).rstrip(b"=")
    except TypeError:
        return  # half a pair of surrogates
    with pytest.raises(InvalidTransferToken):
        TransferToken.parse(f"{written.decode()}.{signature(KEY, b'offer', written)}", KEY, 0.0)
