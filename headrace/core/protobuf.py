# SPDX-License-Identifier: Apache-2.0
"""Protobuf messages from a compiled descriptor set, in a descriptor pool of their own.

The default pool is shared by the whole process: a client library that registers the same names would conflict, and so would
two versions of one protocol.
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
        """Return a message class by its full name. Typed `Any`: only protobuf knows its attributes."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def services(self) -> list[ServiceDescriptor]:
        """Return every service of the set."""
        return [service for file in self.files for service in file.services_by_name.values()]
