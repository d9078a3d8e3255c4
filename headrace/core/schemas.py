# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages from a compiled descriptor set, in a pool of their own.

Rooms that speak protobuf load their set once with this. A pool of its own, because the default pool is shared by the
whole process: a client library that brings the same names in would clash, and so would two generations of one protocol.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool


class Schema:
    """The message classes and services of one descriptor set."""

    def __init__(self, descriptor_set: bytes) -> None:
        self._pool = DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set)
        for file in files.file:
            self._pool.AddSerializedFile(file.SerializeToString())
        self.files: list[FileDescriptor] = [self._pool.FindFileByName(file.name) for file in files.file]

    def message(self, full_name: str) -> Any:
        """A message class by its full name. `Any`, since its attributes are known to protobuf alone."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def services(self) -> list[ServiceDescriptor]:
        """Every service of the set."""
        return [service for file in self.files for service in file.services_by_name.values()]
