# SPDX-License-Identifier: Apache-2.0
"""The peer `handler`: the model `identity` on Headrace's network code, without the engine.

The handlers decode a request, name its input OUTPUT0 and encode the answer, all in one call. What `headrace serve`
needs more than this for the same request is the cost of its engine: checks, queue, batcher, instance.
"""

from __future__ import annotations

import gc
import sys
from functools import partial

import uvloop

from headrace.api.v2 import grpc_codec, http_codec
from headrace.api.v2.grpc_messages import SERVICE
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, OK_EMPTY, OK_JSON, Buffer, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer, run_until_signal
from headrace.net.site import Site
from headrace.net.sockets import Address

HEADER_LENGTH = b"inference-header-content-length"
OK_BINARY = ResponseHead(200, [(CONTENT_TYPE, b"application/octet-stream")])


class Handlers:
    """The two ways in."""

    def __init__(self) -> None:
        self._json = http_codec.HttpCodec()
        self._grpc = grpc_codec.GrpcCodec()

    def ready(self, exchange: Exchange) -> None:
        exchange.respond(OK_EMPTY)

    def infer(self, exchange: Exchange) -> None:
        length = exchange.head.by_name.get(HEADER_LENGTH)
        request = self._json.decode_request(exchange.params[0], "", exchange.body, length)
        exchange.body = b""
        json_length, buffers = http_codec.encode_response(_answer(request), request)
        if json_length is None:
            exchange.respond(OK_JSON, buffers)
        else:
            exchange.respond(OK_BINARY, buffers, ((HEADER_LENGTH, b"%d" % json_length),))

    def model_infer(self, call: GrpcCall, message: Buffer) -> None:
        call.reply(grpc_codec.encode_response(_answer(self._grpc.decode_request(message))))


def _answer(request: InferRequest) -> InferResponse:
    tensor = request.inputs[0]
    return InferResponse(request.model_name, "1", [Tensor("OUTPUT0", tensor.dtype, tensor.array)], request.id)


async def serve(http_port: int, grpc_port: int) -> int:
    handlers = Handlers()
    routes = Routes()
    routes.add("GET", "/v2/health/ready", handlers.ready)
    routes.add("POST", "/v2/models/{model}/infer", handlers.infer)
    services = Services()
    services.unary(SERVICE, "ModelInfer", handlers.model_infer)
    site = Site(routes, services=services)
    addresses = [Address.parse(f"127.0.0.1:{port}") for port in (http_port, grpc_port)]
    servers = [HttpServer(site, address, partial(NegotiatingProtocol, site)) for address in addresses]
    for server in servers:
        await server.start()
    # As `headrace serve` does.
    gc.collect()
    gc.freeze()
    return await run_until_signal(servers, grace_seconds=1.0)


if __name__ == "__main__":
    raise SystemExit(uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]))))
