# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages from descriptor sets that do not know each other."""

import pytest
from google.protobuf import descriptor_pb2

from headrace.core.protobuf import Schema


def descriptor_set(field: str) -> bytes:
    files = descriptor_pb2.FileDescriptorSet()
    base = files.file.add(name="base.proto", package="p", syntax="proto3")
    message = base.message_type.add(name="Thing")
    message.field.add(name=field, number=1, label=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING)
    user = files.file.add(name="user.proto", package="p", syntax="proto3", dependency=["base.proto"])
    service = user.service.add(name="Things")
    service.method.add(name="Get", input_type=".p.Thing", output_type=".p.Thing")
    return files.SerializeToString()


def test_messages_are_found_by_name_and_travel():
    thing = Schema(descriptor_set("name")).message("p.Thing")
    wire = thing(name="é").SerializeToString()
    assert thing.FromString(wire).name == "é"


def test_two_generations_of_one_name_live_side_by_side():
    old, new = (Schema(descriptor_set(field)).message("p.Thing") for field in ("before", "after"))
    assert new.FromString(old(before="x").SerializeToString()).after == "x"


def test_files_and_services_are_listed():
    schema = Schema(descriptor_set("name"))
    assert [file.name for file in schema.files] == ["base.proto", "user.proto"]
    assert [service.full_name for service in schema.services()] == ["p.Things"]


def test_an_unknown_message_is_an_error():
    with pytest.raises(KeyError):
        Schema(descriptor_set("name")).message("p.Nothing")
