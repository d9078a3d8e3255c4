# SPDX-License-Identifier: Apache-2.0
"""Continuation of a streamed response on another server: the header, the records in the stream, and who may ask for it.

A router asks for records with the header `x-headrace-continuation: track`. The server then writes a comment line before the
events that each reply of the model became, which the router keeps and does not pass on:

    :r {"id":"9f...","created":1790000000}      first: what the ids of the response are made from
    :r {"i":0,"t":[17,204]}                     a reply: its choice and its tokens, and in a choice's first reply more
    :r "failed"                                 the server cannot go on; the events behind it are its error

When the server dies, the router sends the client's request, the records, and how many bytes it has passed on since the last
record to another server (`POST /v1/headrace/continue`). That one repeats the replies in silence, so that ids, numbers of
events, parsers and counts are as they were, leaves out what the client has, and goes on. It needs a proof that the router
knows the key of the fleet, since the request says what the model has said.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from headrace.core.kv_transfer import CLOCK_SKEW_SECONDS, signature

CONTINUE_PATH = "/v1/headrace/continue"
CONTINUATION_HEADER = b"x-headrace-continuation"
"""In a client's request: `track`. In a request to `CONTINUE_PATH`: the proof."""
TRACK = b"track"
STREAM_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""The requests whose streams can be continued."""
RECORD = b":r "
"""The beginning of a record's line."""
FAILED = b'"failed"'
"""The record of a server that cannot go on."""
_PROOF = re.compile(rb"[0-9]{1,12}\.[0-9a-f]{64}")


def continuation_proof(key: bytes, body: bytes, now: float) -> bytes:
    """Return the proof that a router sends: it knows the key and sends this body now."""
    return _proof(key, body, b"%d" % int(now))


def is_valid_continuation_proof(key: bytes, proof: bytes, body: bytes, now: float) -> bool:
    """Return whether a proof is valid for this body and recent."""
    if not _PROOF.fullmatch(proof):
        return False
    time = proof.partition(b".")[0]
    return abs(now - int(time)) <= CLOCK_SKEW_SECONDS and hmac.compare_digest(proof, _proof(key, body, time))


def _proof(key: bytes, body: bytes, time: bytes) -> bytes:
    return time + b"." + signature(key, b"continue", time, hashlib.sha256(body).digest()).encode()
