# SPDX-License-Identifier: Apache-2.0
"""TLS contexts from certificate files, reloaded whenever the files change.

Called by `server.HttpServer`: once at the start, then once a second. A connection keeps the context it started with, so a
reload drops no connection.

The server gives each new context to a new asyncio server on the same listening socket. The usual alternative, an outer
context whose `sni_callback` swaps in the newest one, is not used: sessions belong to the outer context, so a client whose
CA was withdrawn could resume an old session and never show a certificate again.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument

log = logging.getLogger("headrace.wire")

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2 only: what RFC 9113 (HTTP/2) section 9.2.2 allows. All suites of TLS 1.3 are good."""

_Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one listener."""

    certificate: str
    """The server's certificate, followed by its intermediates."""
    key: str
    """Its private key, not encrypted."""
    client_ca: str | None = None
    """When set, every client must show a certificate that one of these authorities signed (mutual TLS)."""
    alpn: tuple[str, ...] = ("h2", "http/1.1")
    """Protocols offered, the preferred one first."""

    def paths(self) -> tuple[str, ...]:
        """Return the files to watch."""
        return (self.certificate, self.key) + ((self.client_ca,) if self.client_ca is not None else ())


class ReloadingTlsContext:
    """The newest valid context of some files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = _stamp(files)
        self.context = make_context(files)
        """The context for new connections. Replaced on reload, never changed."""

    def refresh(self) -> None:
        """Make a new context if the files changed; keep the old one if the new files are invalid."""
        # Taken before the files are read: a change while reading shows up as another stamp at the next call.
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.context = make_context(self._files)
        except InvalidArgument as error:
            log.error("changed TLS files are invalid, the old ones stay in use: %s", error.message)


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context: TLS 1.2 or newer, forward secrecy, ALPN, client certificates if configured."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(list(files.alpn))
    _load_identity(context, files)
    if files.client_ca is not None:
        try:
            context.load_verify_locations(cafile=files.client_ca)
        except OSError as error:
            raise InvalidArgument(
                f"TLS client authorities {files.client_ca}: {_reason(error)}; give a PEM file of CA certificates"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_identity(context: ssl.SSLContext, files: TlsFiles) -> None:
    def encrypted() -> str:
        # Without this, OpenSSL would prompt for the passphrase on the terminal and the server would wait.
        raise InvalidArgument(f"TLS key {files.key} is encrypted; decrypt it with `openssl pkey -in KEY -out NEW_KEY`")

    for path in (files.certificate, files.key):
        try:
            open(path, "rb").close()
        except OSError as error:  # OpenSSL does not say which of the two failed
            raise InvalidArgument(f"TLS file {path}: {error.strerror}; check the path and its permissions") from None
    try:
        context.load_cert_chain(files.certificate, files.key, password=encrypted)
    except OSError as error:
        raise InvalidArgument(
            f"TLS certificate {files.certificate} with key {files.key}: {_reason(error)}; "
            "both must be PEM, and the key must be the one of the first certificate"
        ) from None


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return (reason or "it cannot be read").lower().replace("_", " ")


def _stamp(files: TlsFiles) -> _Stamp:
    return tuple(_stamp_of(path) for path in files.paths())


def _stamp_of(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is rewritten, replaced, or its symbolic link moves (Kubernetes secrets)."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
