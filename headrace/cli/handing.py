# SPDX-License-Identifier: Apache-2.0
"""From options to a server's part where prefill and decode are apart, and the key that the servers of a fleet share."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.cli.flags import Given
from headrace.core.errors import InvalidArgument
from headrace.core.handing import LEAST_KEY_BYTES, HandingSettings, Role

KEY_VARIABLE = "HEADRACE_HANDING_KEY"
_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
_MOST_KEY_BYTES = 4096
_ADDRESS = "--handing-address is HOST:PORT, such as 10.0.0.7:8003: an address of this machine that the decoders reach"


def handing_settings(given: Given, environment: Mapping[str, str] | None = None) -> HandingSettings:
    """What the options say. Raises InvalidArgument."""
    role = _ROLES.get(given.text("role"))
    if role is None:
        for name in ("handing-address", "handing-key-file"):
            if given.has(name):
                raise InvalidArgument(f"--{name} is for a server that has a part: add --role prefill or --role decode")
        return HandingSettings()
    if given.whole("workers") > 1:
        raise InvalidArgument("--role is for a server of one process, which has the pages: leave out --workers")
    host, port = _address(given.text("handing-address"))
    key = handing_key(given.text("handing-key-file"), environment)
    if not key and not _is_loopback(host):
        raise InvalidArgument(
            f"pages leave this machine at {host}, so the servers must know each other: give each the same "
            f"--handing-key-file, or {KEY_VARIABLE}"
        )
    return HandingSettings(
        role,
        key,
        host,
        port,
        keep_seconds=given.number("handing-seconds"),
        keep_bytes=given.whole("handing-bytes"),
    )


def handing_key(path: str, environment: Mapping[str, str] | None = None) -> bytes:
    """The key that servers and routers share; empty where there is none. Raises InvalidArgument."""
    if path:
        try:
            with Path(path).open("rb") as stream:
                key = stream.read(_MOST_KEY_BYTES).strip()
        except OSError as error:
            raise InvalidArgument(f"the key file {path[:200]!a} cannot be read: {error.strerror}") from None
        told = path
    else:
        key = (os.environ if environment is None else environment).get(KEY_VARIABLE, "").strip().encode()
        told = KEY_VARIABLE
    if (path or key) and len(key) < LEAST_KEY_BYTES:
        raise InvalidArgument(f"{told} has a key of {len(key)} bytes: make one of {LEAST_KEY_BYTES} or more at random")
    return key


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(_ADDRESS)
    if host in ("0.0.0.0", "::"):  # noqa: S104  what is refused here
        raise InvalidArgument(f"{_ADDRESS}; {host} is none that one can connect to")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
