# SPDX-License-Identifier: Apache-2.0
"""Other people's parts around the router: grpcio's own server behind it, Triton's client before it, TLS on both sides."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import trustme
from grpc_router import SECONDS, channel_to, raised, routing, unary

from headrace.net.grpc.standard_services import HealthService
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.programs.serve.server import ServerSettings, build_site
from support.engines import builtin_plane
from support.serving import echo_site, serving


class _Echo(grpc.GenericRpcHandler):
    """`test.Echo` as grpcio serves it."""

    def service(self, details: Any) -> Any:
        if details.method.endswith("Chat"):
            return grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
        return grpc.unary_unary_rpc_method_handler(self.unary)

    def unary(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        results = dict(context.invocation_metadata())
        context.send_initial_metadata((("x-via", str(results.get("via"))), ("x-number", str(results.get("x-number")))))
        context.set_trailing_metadata((("x-last-bin", b"\xff\0"),))
        if message == b"refuse":
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "too far: 100 % of it")
        return message


@pytest.fixture(scope="module")
def grpcio() -> Iterator[int]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), handlers=[_Echo()], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


def test_grpcio_behind_the_router(grpcio: int) -> None:
    with routing(grpcio) as router, channel_to(router) as channel:
        for number in range(30):
            answer, call = unary(channel).with_call(
                b"%d" % number, metadata=(("x-number", str(number % 10)),), timeout=SECONDS
            )
            assert answer == b"%d" % number
            initial = dict(call.initial_metadata())
            assert (initial["x-via"], initial["x-number"]) == ("2 headrace-router", str(number % 10))
            assert dict(call.trailing_metadata()) == {"x-last-bin": b"\xff\0"}
        error = raised(lambda: unary(channel)(b"refuse", timeout=SECONDS))
        assert (error.code(), error.details()) == (grpc.StatusCode.OUT_OF_RANGE, "too far: 100 % of it")
        big = bytes(range(256)) * 32768
        assert unary(channel)(big, timeout=SECONDS) == big
        messages = [b"%d" % number for number in range(100)]
        assert list(channel.stream_stream("/test.Echo/Chat")(iter(messages), timeout=SECONDS)) == messages
        futures = [unary(channel).future(b"%d" % number, timeout=SECONDS) for number in range(500)]
        assert [future.result() for future in futures] == [b"%d" % number for number in range(500)]
        # What repeats is decoded once: the backend keeps no table of headers for us.
        # A connection that was opened while others answered may have had no call.
        readers = [connection._response_headers for connection in router.connections()]
        assert any(reader._heads and reader._tails for reader in readers)


async def _v2_site() -> Site:
    address = Address.parse("127.0.0.1:0")
    return build_site(await builtin_plane(), ServerSettings(http=address, grpc=address))[0]


def test_tritons_client_before_the_router() -> None:
    array = np.arange(8, dtype=np.float32).reshape(1, 8)
    wanted = tritonclient.grpc.InferInput("INPUT0", list(array.shape), "FP32")
    wanted.set_data_from_numpy(array)
    with serving(_v2_site) as one, serving(_v2_site) as two, routing(one.port, two.port) as router:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{router.port}", channel_args=options) as client:
            assert client.is_server_ready()
            models = [model["name"] for model in client.get_model_repository_index(as_json=True)["models"]]
            (name,) = [name for name in models if name == "identity"] or models[:1]
            for _ in range(4):
                result = client.infer(name, [wanted], client_timeout=SECONDS)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
            answers: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: answers.put((result, error)))
            for number in range(10):
                client.async_stream_infer(name, [wanted], request_id=str(number))
            seen = [answers.get(timeout=SECONDS) for _ in range(10)]
            client.stop_stream()
            assert [error for _, error in seen] == [None] * 10
            assert [result.get_response().id for result, _ in seen] == [str(number) for number in range(10)]
            with pytest.raises(tritonclient.grpc.InferenceServerException, match="nothing_of_the_kind"):
                client.infer("nothing_of_the_kind", [wanted])
        assert router.backend(0).stats.ok > 2
        assert router.backend(1).stats.ok > 2


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, str, TlsFiles]:
    folder: Path = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    return ca, str(folder / "ca.pem"), TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"))


def test_tls_on_both_sides(authority: tuple[trustme.CA, str, TlsFiles]) -> None:
    ca, ca_file, files = authority
    big = bytes(range(256)) * 4096
    with serving(echo_site(), tls=files) as backend:
        with routing(f"https://127.0.0.1:{backend.port}", ca_file=ca_file, tls=files) as router:
            credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
            with grpc.secure_channel(f"127.0.0.1:{router.port}", credentials) as channel:
                assert unary(channel)(big, timeout=SECONDS) == big
                _, call = unary(channel, "Metadata").with_call(b"", timeout=SECONDS)
                assert dict(call.initial_metadata())["x-forwarded-proto"] == "https"


def test_a_backend_that_cannot_be_trusted(authority: tuple[trustme.CA, str, TlsFiles]) -> None:
    _, _, files = authority
    with serving(echo_site(), tls=files) as backend, routing(f"https://127.0.0.1:{backend.port}") as router:
        with channel_to(router) as channel:
            error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "certificate is not signed" in error.details()


def test_a_backend_without_http_2(authority: tuple[trustme.CA, str, TlsFiles]) -> None:
    _, ca_file, files = authority
    old = TlsFiles(files.certificate, files.key, alpn=("http/1.1",))
    with serving(echo_site(), tls=old) as backend:
        with routing(f"https://127.0.0.1:{backend.port}", ca_file=ca_file) as router, channel_to(router) as channel:
            error = raised(lambda: unary(channel)(b"x", timeout=SECONDS))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "HTTP/2" in error.details()


def test_the_router_can_answer_for_itself() -> None:
    """Health is passed on unless the router is given a service of its own."""
    with serving(echo_site()) as backend, routing(backend.port) as router, channel_to(router) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=SECONDS) == b"\x08\x01"
        assert router.backend(0).stats.ok == 1
        router.call(lambda: HealthService().add_to(router.proxy.services))
        with channel_to(router) as fresh:
            assert fresh.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SECONDS) == b"\x08\x01"
        assert router.backend(0).stats.ok == 1
