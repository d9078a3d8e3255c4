# SPDX-License-Identifier: Apache-2.0
"""CUDA regions on a real GPU, shared by another process. Skipped without one: `test_v2_cuda_regions` has a stand-in."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from headrace.api.shared_memory import SharedMemory
from headrace.core.errors import InvalidArgument

runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs the package cuda-python")
if int(runtime.cudaGetDeviceCount()[0]) or not runtime.cudaGetDeviceCount()[1]:
    pytest.skip("needs a GPU", allow_module_level=True)

BYTES = 4096
CLIENT = """
import ctypes
import sys
from cuda.bindings import runtime

def done(result):
    if int(result[0]):
        sys.exit(str(result[0]))
    return result[1] if len(result) > 1 else None

done(runtime.cudaSetDevice(0))
address = done(runtime.cudaMalloc(4096))
done(runtime.cudaMemset(address, 7, 4096))
done(runtime.cudaDeviceSynchronize())
print(bytes(done(runtime.cudaIpcGetMemHandle(address)).reserved).hex(), flush=True)
seen = (ctypes.c_char * 4096)()
for _ in sys.stdin:
    done(runtime.cudaMemcpy(ctypes.addressof(seen), address, 4096, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost))
    print(bytes(seen).hex(), flush=True)
"""


class Client:
    """Another process, with memory on the GPU."""

    def __init__(self, asked: IO[str], told: IO[str]) -> None:
        self._asked, self._told = asked, told
        self.handle = bytes.fromhex(told.readline())

    def memory(self) -> bytes:
        """What lies in its memory now."""
        print("show", file=self._asked, flush=True)
        return bytes.fromhex(self._told.readline())


@pytest.fixture
def client() -> Iterator[Client]:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("it has no pipes")
        yield Client(process.stdin, process.stdout)
        process.stdin.close()


def test_what_a_client_wrote_is_read_and_what_is_written_is_there_for_it(client: Client) -> None:
    memory = SharedMemory(allowed=True)
    memory.register_cuda("region", client.handle, 0, BYTES)
    assert bytes(memory.reader().read("region", 100, 8)) == b"\x07" * 8
    memory.placement("region", 1024, 16).write("OUTPUT0", b"0123456789abcdef")
    seen = client.memory()
    assert (seen[1023:1041], len(seen)) == (b"\x070123456789abcdef\x07", BYTES)
    memory.unregister_cuda("region")
    gc.collect()
    # Unmapped: the same handle can be opened again.
    memory.register_cuda("again", client.handle, 0, BYTES)
    assert bytes(memory.reader().read("again", 1024, 4)) == b"0123"


def test_more_bytes_than_there_are_and_handles_that_are_none_are_refused(client: Client) -> None:
    memory = SharedMemory(allowed=True)
    with pytest.raises(InvalidArgument, match="GPU 0 cannot open this handle"):
        memory.register_cuda("none", b"h" * 64, 0, BYTES)
    with pytest.raises(InvalidArgument, match=r"are over the \d+ that it has"):
        memory.register_cuda("large", client.handle, 0, 1 << 40)
    with pytest.raises(InvalidArgument, match="GPU 9 cannot open this handle"):
        memory.register_cuda("elsewhere", client.handle, 9, BYTES)
    memory.register_cuda("region", client.handle, 0, BYTES)
