# SPDX-License-Identifier: Apache-2.0
"""Ids by which a person finds a request again in the logs."""

from __future__ import annotations

import re
import secrets

REQUEST_ID_FIELD = "x-request-id"
"""Where a client may send its own id, and where it finds ours."""

_ACCEPTABLE = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")


def request_id(sent: bytes | None) -> str:
    """The id a client sent, if it is fit for a log; otherwise a new one that nobody can guess."""
    if sent is not None and _ACCEPTABLE.fullmatch(sent):
        return sent.decode()
    return secrets.token_hex(8)
