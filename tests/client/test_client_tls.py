# SPDX-License-Identifier: Apache-2.0
"""TLS: whom a client trusts, and what it shows of itself."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from client_servers import HeldSite

from headrace.client import NO_RETRY
from headrace.core.errors import InvalidArgument, Unavailable, Unimplemented
from headrace.net.tls import TlsFiles
from support.serving import Serving, serving


class Files:
    """PEM files of a server, a client and their authority."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = self._issue(folder, "server", authority.issue_cert("127.0.0.1", "localhost"))
        self.client = self._issue(folder, "client", authority.issue_cert("client@example.org"))

    def _issue(self, folder: Path, name: str, made: Any) -> tuple[str, str]:
        cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        made.private_key_pem.write_to_path(key)
        for index, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(cert, append=index > 0)
        return cert, key


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[Serving]:
    with serving(HeldSite().site, tls=TlsFiles(files.cert, files.key)) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(files: Files) -> Iterator[Serving]:
    with serving(HeldSite().site, tls=TlsFiles(files.cert, files.key, files.ca)) as running:
        yield running


def https(server: Serving) -> str:
    return f"https://127.0.0.1:{server.port}"


def test_a_trusted_authority(server: Serving, make: Any, files: Files) -> None:
    for verify in (files.ca, ssl.create_default_context(cafile=files.ca)):
        with make(https(server), verify=verify) as client:
            assert client.metadata("m")["outputs"]


def test_an_unknown_authority_is_refused_with_a_hint(server: Serving, make: Any) -> None:
    with (
        make(https(server), retry=NO_RETRY) as client,
        pytest.raises(Unavailable, match=r"not trusted.*verify='ca\.pem'"),
    ):
        client.metadata("m")


def test_a_wrong_name_is_refused(server: Serving, make: Any, files: Files) -> None:
    with make(f"https://127.0.0.2:{server.port}", verify=files.ca) as client, pytest.raises(Unavailable):
        client.metadata("m")


def test_certificates_are_not_checked_if_disabled(server: Serving, make: Any) -> None:
    with make(https(server), verify=False) as client:
        assert client.metadata("m")["outputs"]


def test_a_server_that_wants_a_certificate(mutual: Serving, make: Any, files: Files) -> None:
    with make(https(mutual), verify=files.ca, cert=files.client) as client:
        assert client.metadata("m")["outputs"]
    with make(https(mutual), verify=files.ca, retry=NO_RETRY) as client, pytest.raises(Unavailable):
        client.metadata("m")


def test_grpc_over_tls(server: Serving, mutual: Serving, make: Any, files: Files) -> None:
    with make(f"grpcs://127.0.0.1:{server.port}", verify=files.ca) as client:
        assert client.live()
    with make(f"grpcs://127.0.0.1:{mutual.port}", verify=files.ca, cert=files.client) as client:
        assert client.live()
    for refused in (
        make(f"grpcs://127.0.0.1:{server.port}", retry=NO_RETRY),
        make(f"grpcs://127.0.0.1:{mutual.port}", verify=files.ca, retry=NO_RETRY),
    ):
        with refused, pytest.raises(Unavailable, match="grpcs://127"):
            refused.metadata()


def test_files_that_do_not_help(files: Files, make: Any) -> None:
    for url in ("https://127.0.0.1", "grpcs://127.0.0.1"):
        with pytest.raises(InvalidArgument, match="none.pem"):
            make(url, verify=str(Path(files.ca).parent / "none.pem"))
    with pytest.raises(Unimplemented, match="always checks"):
        make("grpcs://127.0.0.1", verify=False)


def test_plain_http_to_tls_and_tls_to_plain_http(server: Serving, make: Any, files: Files) -> None:
    with make(f"http://127.0.0.1:{server.port}", retry=NO_RETRY) as client, pytest.raises(Unavailable):
        client.metadata("m")
    with serving(HeldSite().site) as plain:
        url = f"https://127.0.0.1:{plain.port}"
        with make(url, retry=NO_RETRY) as client, pytest.raises(Unavailable, match="check that this port speaks TLS"):
            client.metadata("m")
