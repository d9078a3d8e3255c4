# SPDX-License-Identifier: Apache-2.0
"""Calls over gRPC as bytes, and which methods there are."""

from __future__ import annotations

import socket

import grpc
from described_server import DescribedServer
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

_METHODS: dict[int, list[str]] = {}


def grpc_methods(server: DescribedServer) -> list[str]:
    """Every method of every service, by reflection."""
    if server.port not in _METHODS:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            _METHODS[server.port] = sorted(
                f"/{name}/{method.name}"
                for name in database.get_services()
                if not name.startswith("grpc.reflection")
                for method in pool.FindServiceByName(name).methods
            )
    assert len(_METHODS[server.port]) > 20
    return _METHODS[server.port]


def varint(number: int) -> bytes:
    created = b""
    while number > 127:
        created += bytes([number & 127 | 128])
        number >>= 7
    return created + bytes([number])


def status(channel: grpc.Channel, path: str, message: bytes) -> str:
    call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
    try:
        call(message, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def framed(server: DescribedServer, path: str, body: bytes) -> str:
    """The `grpc-status` of a call whose frame is given as bytes; "" if there is none."""
    connection = H2Connection(H2Configuration(header_encoding="utf-8"))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        connection.initiate_connection()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test"), ("te", "trailers")]
        connection.send_headers(1, [*head, ("content-type", "application/grpc")])
        connection.send_data(1, body, end_stream=True)
        sock.sendall(connection.data_to_send())
        reported = ""
        while data := sock.recv(65536):
            for event in connection.receive_data(data):
                if isinstance(event, ResponseReceived | TrailersReceived):
                    reported = dict(event.headers).get("grpc-status", reported)
                if isinstance(event, DataReceived):
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                    if path.endswith("/Watch"):
                        return reported  # which goes on for as long as the server is there
                if isinstance(event, StreamEnded | StreamReset):
                    return reported
            sock.sendall(connection.data_to_send())
    return reported
