# SPDX-License-Identifier: Apache-2.0
"""Check command-line options and turn them into settings; report errors with the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from headrace.core.errors import BAD_CONFIGURATION, HeadraceError, InvalidArgument
from headrace.core.extras import MissingExtra

if TYPE_CHECKING:
    from headrace.net.sockets import Address
    from headrace.net.tls import TlsFiles

FAILED = 1
BAD_USE = BAD_CONFIGURATION
_COMMAND = re.compile(r"([`'])(headrace [^`']+)\1")


def print_error(text: str, hint: str = "") -> None:
    """Print an error to standard error. The only way in which commands report one.

    The hint is on the next line. Without one, each command that the text quotes is repeated there, ready to copy.
    """
    _print("error", text, hint, "red")


def print_warning(text: str, hint: str = "") -> None:
    """Print a warning to standard error, with a hint as for an error."""
    _print("warning", text, hint, "yellow")


def _print(word: str, text: str, hint: str, colour: str) -> None:
    from headrace.core.telemetry.logs import colour_allowed, one_line

    # None: in colour on a terminal, plain elsewhere.
    typer.secho(f"{word}: {one_line(text)}", fg=colour, err=True, color=None if colour_allowed() else False)
    hints = [hint] if hint else dict.fromkeys(command for _, command in _COMMAND.findall(text))
    for line in hints:
        typer.echo(f"  try: {one_line(line)}", err=True)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Report an error in the options and exit with code 2."""
    try:
        yield
    except (HeadraceError, ValueError) as error:
        print_error(str(error))
        raise typer.Exit(BAD_USE) from None


@contextmanager
def report_errors(otherwise: int = BAD_USE) -> Iterator[None]:
    """Report an error in one line.

    The exit code is 1 if a server refused the request, 2 if an extra is not installed, and `otherwise` in other cases.
    """
    from headrace.core.telemetry.logs import one_line

    try:
        yield
    except HeadraceError as error:
        print_error(one_line(error.message))
        if isinstance(error, MissingExtra):
            raise typer.Exit(BAD_USE) from None
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
    """Return the checked URL of the trace collector, or "". Raise InvalidArgument at start, not at the first span.

    Raise MissingExtra if traces cannot be sent by this installation.
    """
    from headrace.core.telemetry.tracing import checked_endpoint, import_exporter

    if not endpoint:
        return ""
    try:
        url = checked_endpoint(endpoint).geturl()
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    import_exporter()
    return url
