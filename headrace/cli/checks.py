# SPDX-License-Identifier: Apache-2.0
"""From options to settings: what the user typed is checked here, and what is wrong is told, with what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.exit_codes import BAD_CONFIGURATION

if TYPE_CHECKING:
    from headrace.net.sockets import Address
    from headrace.net.tls import TlsFiles

FAILED = 1
BAD_USE = BAD_CONFIGURATION
_COMMAND = re.compile(r"([`'])(headrace [^`']+)\1")


def complain(text: str) -> None:
    """Print an error for people. The commands that it names stand below it again, each on a line that can be copied."""
    typer.secho(f"headrace: {text}", fg="red", err=True)
    for command in dict.fromkeys(command for _, command in _COMMAND.findall(text)):
        typer.secho(f"     try: {command}", err=True)


@contextmanager
def or_exit() -> Iterator[None]:
    """Turn an error meant for the user into its text and exit code 2."""
    try:
        yield
    except (HeadraceError, ValueError) as error:
        complain(str(error))
        raise typer.Exit(BAD_USE) from None


@contextmanager
def told(otherwise: int = BAD_USE) -> Iterator[None]:
    """Turn an error into one line: exit code 1 for what a server refused, `otherwise` when nothing could be asked."""
    from headrace.core.telemetry.logs import one_line

    try:
        yield
    except HeadraceError as error:
        complain(one_line(error.message))
        raise typer.Exit(otherwise if error.status is None else FAILED) from None


def address_of(host: str, port: int, unix_socket: str) -> Address:
    """Where to listen: the socket if one is named, otherwise the port."""
    from headrace.net.sockets import Address

    if unix_socket:
        return Address.parse(f"unix:{unix_socket}")
    return Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def tls_of(certificate: str, key: str, client_ca: str) -> TlsFiles | None:
    """The TLS files, or None when no option names one."""
    from headrace.net.tls import TlsFiles

    if not (certificate or key or client_ca):
        return None
    if not (certificate and key):
        raise InvalidArgument("TLS needs both --tls-certificate and --tls-key")
    return TlsFiles(certificate, key, client_ca or None)


def collector_of(endpoint: str) -> str:
    """Where spans go, if anywhere. Raises InvalidArgument before anything is started, not when the first one is sent."""
    from headrace.core.telemetry.tracing import checked_endpoint

    try:
        return checked_endpoint(endpoint).geturl() if endpoint else ""
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
