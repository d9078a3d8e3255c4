# SPDX-License-Identifier: Apache-2.0
"""Connections from the other nodes to node 0: both sides prove that they have the key, then they are a `Link`.

node R                              node 0
magic, nonce                   -->
                               <--  nonce, proof
proof                          -->
JOIN (which node, what for)    -->
                               <--  READY, or ERROR (the reason)

A proof is an HMAC of both nonces. What follows is neither encrypted nor signed: the network between the nodes has to be
trusted, as for NCCL and gloo, which know no authentication at all.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Mapping
from time import monotonic
from typing import Any

from headrace.backends.llm.kv_transfer.sender import read_exactly
from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, LinkTimeout, keep_alive, read_json
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable, error_of
from headrace.core.kv_transfer import signature

_MAGIC = b"HRnode01"
_NONCE_BYTES, _PROOF_BYTES = 16, 64
HANDSHAKE_SECONDS = 10.0
SEND_SECONDS = 10.0
"""A peer that does not read for so long is gone."""


def join(address: tuple[str, int], key: bytes, request: Mapping[str, Any]) -> Link:
    """Connect to node 0. Raises Unavailable if it cannot be reached now, and FailedPrecondition if it refuses."""
    where = f"node 0 at {address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, HANDSHAKE_SECONDS)
    except OSError as error:
        raise Unavailable(f"{where} cannot be reached: {error.strerror or error}") from None
    try:
        return _join(sock, key, request, where)
    except BaseException:
        sock.close()
        raise


def _join(sock: socket.socket, key: bytes, request: Mapping[str, Any], where: str) -> Link:
    deadline = monotonic() + HANDSHAKE_SECONDS
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        sock.sendall(_MAGIC + own)
        theirs = read_exactly(sock, _NONCE_BYTES, deadline)
        proof = read_exactly(sock, _PROOF_BYTES, deadline)
    except OSError:
        raise Unavailable(f"{where} has closed the connection: is Headrace at this port?") from None
    if not hmac.compare_digest(proof, _proof(key, b"node 0", own, theirs)):
        raise FailedPrecondition(
            f"{where} has another key: give all nodes the same --handing-key-file or HEADRACE_HANDING_KEY"
        )
    keep_alive(sock)
    link = Link(sock)
    try:
        sock.sendall(_proof(key, b"node", own, theirs))
        link.send_json(Kind.JOIN, request)
        kind, payload = link.receive(HANDSHAKE_SECONDS)
    except (OSError, LinkClosed, LinkTimeout):
        raise Unavailable(f"{where} has closed the connection") from None
    if kind is Kind.READY:
        link.set_timeout(SEND_SECONDS)
        return link
    content = read_json(payload)
    error = error_of(content["code"], content["message"]) if kind is Kind.ERROR else None
    raise error or Unavailable(f"{where} has closed the connection")


def welcome(sock: socket.socket, key: bytes) -> tuple[Link, dict[str, Any]]:
    """Authenticate a connection to node 0; return what its node says. Raises ConnectionError or TimeoutError."""
    deadline = monotonic() + HANDSHAKE_SECONDS
    if read_exactly(sock, len(_MAGIC), deadline) != _MAGIC:
        raise ConnectionError("it is no node")
    theirs, own = read_exactly(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(own + _proof(key, b"node 0", theirs, own))
    if not hmac.compare_digest(read_exactly(sock, _PROOF_BYTES, deadline), _proof(key, b"node", theirs, own)):
        raise ConnectionError("it has another key")
    keep_alive(sock)
    link = Link(sock)
    try:
        kind, payload = link.receive(deadline - monotonic())
        if kind is not Kind.JOIN:
            raise ConnectionError("it does not say which node it is")
        request = read_json(payload)
    except (LinkClosed, LinkTimeout):
        raise ConnectionError("it has closed the connection") from None
    link.set_timeout(SEND_SECONDS)
    return link, request


def refuse(link: Link, error: HeadraceError) -> None:
    """Tell a node why it may not join, and close the connection."""
    try:
        link.send_json(Kind.ERROR, {"code": error.code.value, "message": error.message})
    except (LinkClosed, LinkTimeout):
        pass
    finally:
        link.close()


def _proof(key: bytes, who: bytes, nonce: bytes, answer: bytes) -> bytes:
    return signature(key, who, nonce, answer).encode()
