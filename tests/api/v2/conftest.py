# SPDX-License-Identifier: Apache-2.0
"""The real site, with its built-in models, for each file of tests; the real clients of Triton for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc
import tritonclient.http

from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.engines import builtin_plane
from support.serving import Serving, serving


async def _site() -> Site:
    address = Address.parse("127.0.0.1:0")
    return build_site(await builtin_plane(), ServerSettings(http=address, grpc=address))[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(_site) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=30.0) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(server: Serving) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    url = f"127.0.0.1:{server.port}"
    with tritonclient.grpc.InferenceServerClient(url, channel_args=options) as client:
        yield client
