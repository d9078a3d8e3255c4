# SPDX-License-Identifier: Apache-2.0
"""Server reflection, asked by grpcio's own client (v1alpha) and in raw messages (v1: the same fields)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_echo_client import SECONDS, channel_to, raised
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from headrace.api.v2.grpc_messages import inference_schema
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.engines import builtin_plane
from support.serving import Serving, serving

SERVICES = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
    "nvidia.inferenceserver.GRPCService",
}
VERSIONS = ["v1", "v1alpha"]


@pytest.fixture(scope="module")
def site_server() -> Iterator[Serving]:
    address = Address.parse("127.0.0.1:0")

    async def site() -> Site:
        return build_site(await builtin_plane(), ServerSettings(http=address, grpc=address))[0]

    with serving(site) as running:
        yield running


@pytest.fixture
def site_channel(site_server: Serving) -> Iterator[grpc.Channel]:
    with channel_to(site_server) as channel:
        yield channel


def ask(channel: grpc.Channel, version: str, *requests: dict[str, Any]) -> list[Any]:
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    messages = [reflection_pb2.ServerReflectionRequest(**request) for request in requests]
    return list(method(iter(messages), timeout=SECONDS))


def test_the_database_lists_the_services(site_channel: grpc.Channel) -> None:
    assert set(ProtoReflectionDescriptorDatabase(site_channel).get_services()) == SERVICES


def test_the_database_finds_all_it_needs_to_call_a_method(site_channel: grpc.Channel) -> None:
    """As grpcurl does: the service, its method, the messages; then a call with them."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(site_channel))
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    method = service.FindMethodByName("ServerLive")
    request = GetMessageClass(method.input_type)
    response = GetMessageClass(method.output_type)
    call = site_channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    assert call(request(), timeout=SECONDS).live is True
    infer = pool.FindMessageTypeByName("inference.ModelInferRequest")
    assert "raw_input_contents" in infer.fields_by_name
    nested = pool.FindMessageTypeByName("inference.ModelInferRequest.InferInputTensor")
    assert nested.file.name == infer.file.name
    # The test's own copies of the same names are another pool's.
    assert infer is not inference_schema().message("inference.ModelInferRequest").DESCRIPTOR


def test_the_database_finds_a_file_by_name(site_channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(site_channel)
    file = database.FindFileContainingSymbol("grpc.health.v1.Health")
    assert database.FindFileByName(file.name).package == "grpc.health.v1"


@pytest.mark.parametrize("name", ["inference.Nope", "nope", "inference", ""])
def test_the_database_does_not_find_what_is_not_there(site_channel: grpc.Channel, name: str) -> None:
    database = ProtoReflectionDescriptorDatabase(site_channel)
    with pytest.raises(KeyError):
        database.FindFileContainingSymbol(name)


@pytest.mark.parametrize("version", VERSIONS)
def test_list_services(site_channel: grpc.Channel, version: str) -> None:
    (response,) = ask(site_channel, version, {"host": "h", "list_services": ""})
    assert {service.name for service in response.list_services_response.service} == SERVICES
    assert response.valid_host == "h"
    assert response.original_request.list_services == ""


SYMBOLS = [
    "inference.GRPCInferenceService",
    "inference.GRPCInferenceService.ModelInfer",
    "inference.ModelInferRequest",
    "inference.ModelInferRequest.model_name",
    "inference.ModelInferRequest.InferInputTensor",
    "inference.ModelInferRequest.InferInputTensor.shape",
    "inference.InferParameter.parameter_choice",
    "grpc.health.v1.HealthCheckResponse.ServingStatus",
    "grpc.health.v1.HealthCheckResponse.SERVING",
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_symbol_gives_its_file(site_channel: grpc.Channel, version: str, symbol: str) -> None:
    (response,) = ask(site_channel, version, {"file_containing_symbol": symbol})
    files = [FileDescriptorProto.FromString(raw) for raw in response.file_descriptor_response.file_descriptor_proto]
    assert files
    assert symbol.startswith(files[0].package + ".")


NOT_THERE = [
    {"file_containing_symbol": "inference.GRPCInferenceService.Nope"},
    {"file_containing_symbol": "inference.ModelInferRequest.nope"},
    {"file_containing_symbol": "inference.Nope"},
    {"file_containing_symbol": "inference"},
    {"file_containing_symbol": "x" * 10_000},
    {"file_containing_symbol": ""},
    {"file_by_filename": "../../etc/passwd"},
    {"file_by_filename": ""},
    {"all_extension_numbers_of_type": "inference.Nope"},
    {"file_containing_extension": {"containing_type": "inference.ModelInferRequest", "extension_number": 100}},
]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_there_is_an_answer_not_an_end(site_channel: grpc.Channel, version: str) -> None:
    responses = ask(site_channel, version, *NOT_THERE, {"list_services": ""})
    assert [response.WhichOneof("message_response") for response in responses] == [
        *["error_response"] * len(NOT_THERE),
        "list_services_response",
    ]
    for response in responses[:-1]:
        assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_type_without_extensions_has_no_numbers(site_channel: grpc.Channel) -> None:
    (response,) = ask(site_channel, "v1", {"all_extension_numbers_of_type": "inference.ModelInferRequest"})
    assert response.all_extension_numbers_response.base_type_name == "inference.ModelInferRequest"
    assert list(response.all_extension_numbers_response.extension_number) == []


def test_an_empty_request(site_channel: grpc.Channel) -> None:
    (response,) = ask(site_channel, "v1", {"host": "h"})
    assert response.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_what_is_not_a_request_ends_the_stream(site_channel: grpc.Channel) -> None:
    method = site_channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    assert raised(lambda: method(iter([b"\xff\xff"]), timeout=SECONDS)).code() is grpc.StatusCode.INVALID_ARGUMENT
