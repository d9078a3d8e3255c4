# SPDX-License-Identifier: Apache-2.0
"""System shared memory with the real clients, and everything a client could try with it that it must not."""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from tensors import ARRAYS
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from v2_servers import ask, functions_served

from headrace.api.v2.settings import V2Settings
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import config_of
from support.serving import Serving
from support.waiting import eventually

RESERVED = "triton_python_backend_shm_region_"
TWO = config_of(
    "sum",
    inputs=(InputSpec("A", None, None), InputSpec("B", None, None)),
    outputs=(OutputSpec("SUM", None, None), OutputSpec("DIFF", None, None)),
)
RUNNING, MAY_ANSWER = threading.Event(), threading.Event()


def waits(inputs: Any) -> Any:
    RUNNING.set()
    MAY_ANSWER.wait(30)
    return {"OUTPUT0": inputs["INPUT0"]}


MODELS = [
    (config_of("waits", instance_groups=(InstanceGroup("waits", runs="thread"),)), waits),
    (config_of("same"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]}),
    (TWO, lambda inputs: {"SUM": inputs["A"] + inputs["B"], "DIFF": inputs["A"] - inputs["B"]}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with functions_served(MODELS, V2Settings(allow_client_shm=True)) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(server: Serving, request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = tritonclient.http if request.param == "http" else tritonclient.grpc
    with kind.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        made.address = f"127.0.0.1:{server.port}"
        yield made
        made.unregister_system_shared_memory()


def library(client: Any) -> Any:
    return tritonclient.http if isinstance(client, tritonclient.http.InferenceServerClient) else tritonclient.grpc


@pytest.fixture
def key() -> Iterator[str]:
    name = f"headrace-test-{secrets.token_hex(6)}"
    yield f"/{name}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def made_file(key: str, content: bytes) -> Path:
    path = Path("/dev/shm", key.strip("/"))
    path.write_bytes(content)
    return path


def regions(client: Any) -> dict[str, tuple[str, int, int]]:
    status = client.get_system_shared_memory_status()
    if isinstance(status, list):
        return {status["name"]: (status["key"], status["offset"], status["byte_size"]) for status in status}
    return {name: (item.key, item.offset, item.byte_size) for name, item in status.regions.items()}


def test_tensors_through_shared_memory(client: Any, key: str) -> None:
    """As Triton's example client does it: two inputs and two outputs in one region, at different offsets."""
    one, two = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    handle = shm.create_shared_memory_region("all", key, 256)
    try:
        shm.set_shared_memory_region(handle, [one, two])
        client.register_system_shared_memory("all", key, 256)
        assert regions(client) == {"all": (key, 0, 256)}
        module = library(client)
        inputs = [module.InferInput(name, [1, 16], "INT32") for name in "AB"]
        outputs = [module.InferRequestedOutput(name) for name in ("SUM", "DIFF")]
        for place, tensor in enumerate([*inputs, *outputs]):
            tensor.set_shared_memory("all", 64, offset=64 * place)
        result = client.infer("sum", inputs, outputs=outputs)
        described = result.get_output("SUM")
        shape = described["shape"] if isinstance(described, dict) else list(described.shape)
        assert shape == [1, 16]
        # Triton's C++ HTTP client, and so perf_analyzer, takes an output with parameters for binary data.
        assert not isinstance(described, dict) or "parameters" not in described
        assert (shm.get_contents_as_numpy(handle, np.int32, [1, 16], 128) == one + two).all()
        assert (shm.get_contents_as_numpy(handle, np.int32, [1, 16], 192) == one - two).all()
        # One here, one there.
        inputs[1].set_data_from_numpy(two)
        outputs[0] = module.InferRequestedOutput("SUM")
        assert (client.infer("sum", inputs, outputs=outputs).as_numpy("SUM") == one + two).all()
    finally:
        client.unregister_system_shared_memory("all")
        shm.destroy_shared_memory_region(handle)
    assert regions(client) == {}


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_region_in_use_is_unregistered_when_its_request_ends(client: Any, key: str, side: str) -> None:
    RUNNING.clear()
    MAY_ANSWER.clear()
    module = library(client)
    made_file(key, np.ones(4, np.float32).tobytes())
    client.register_system_shared_memory("r", key, 16)
    given, wanted = module.InferInput("INPUT0", [4], "FP32"), module.InferRequestedOutput("OUTPUT0")
    if side == "input":
        given.set_shared_memory("r", 16)
    else:
        given.set_data_from_numpy(np.zeros(4, np.float32))
        wanted.set_shared_memory("r", 16)
    answers = queue.Queue[Any]()

    def infer() -> None:
        with module.InferenceServerClient(client.address) as other:
            answers.put(other.infer("waits", [given], outputs=[wanted]))

    thread = threading.Thread(target=infer)
    thread.start()
    try:
        assert RUNNING.wait(30)
        client.unregister_system_shared_memory("r")
        assert list(regions(client)) == ["r"]
        with pytest.raises(InferenceServerException, match="shared memory region 'r' already in manager"):
            client.register_system_shared_memory("r", key, 16)
    finally:
        MAY_ANSWER.set()
        thread.join()
    assert answers.get(timeout=30) is not None
    eventually(lambda: regions(client) == {})
    client.register_system_shared_memory("r", key, 16)


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "FP64", "BYTES"])
def test_every_kind_of_type(client: Any, key: str, datatype: str) -> None:
    array = ARRAYS[datatype]
    module = library(client)
    whole = module.InferInput("INPUT0", list(array.shape), datatype)
    whole.set_data_from_numpy(array)
    content = array.tobytes() if datatype != "BYTES" else serialize_byte_tensor(array).item()
    size = len(content)
    path = made_file(key, bytes(7) + content + bytes(size))
    client.register_system_shared_memory("r", key, 2 * size, offset=7)
    given, wanted = module.InferInput("INPUT0", list(array.shape), datatype), module.InferRequestedOutput("OUTPUT0")
    given.set_shared_memory("r", size)
    wanted.set_shared_memory("r", size, offset=size)
    client.infer("same", [given], outputs=[wanted])
    assert path.read_bytes()[7 + size :] == content


async def _aio(server: Serving, module: Any, key: str) -> None:
    made_file(key, np.array([[1.5, 2.5]], np.float32).tobytes() + bytes(8))
    async with module.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        await client.register_system_shared_memory("aio", key, 16)
        given, wanted = module.InferInput("INPUT0", [1, 2], "FP32"), module.InferRequestedOutput("OUTPUT0")
        given.set_shared_memory("aio", 8)
        wanted.set_shared_memory("aio", 8, offset=8)
        await client.infer("same", [given], outputs=[wanted])
        assert len(await client.get_system_shared_memory_status()) if module is tritonclient.http.aio else True
        await client.unregister_system_shared_memory()
    assert np.frombuffer(Path("/dev/shm", key[1:]).read_bytes(), np.float32).tolist() == [1.5, 2.5, 1.5, 2.5]


@pytest.mark.parametrize("module", [tritonclient.http.aio, tritonclient.grpc.aio], ids=["http", "grpc"])
def test_the_aio_clients(server: Serving, module: Any, key: str) -> None:
    asyncio.run(_aio(server, module, key))


def assert_refused(client: Any, text: str, action: Any, *arguments: Any, **more: Any) -> None:
    with pytest.raises(InferenceServerException) as failure:
        action(*arguments, **more)
    assert text in failure.value.message()


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "/",
        "///",
        ".",
        "..",
        "/..",
        "../etc/passwd",
        "a/b",
        "/a/../../etc/passwd",
        "a\0b",
        "x" * 256,
        "\u00e9" * 200,
    ],
)
def test_keys_that_are_not_names(client: Any, bad: str) -> None:
    assert_refused(client, "invalid shm key", client.register_system_shared_memory, "r", bad, 8)


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_the_regions_of_python_models_are_not_for_clients(client: Any, slashes: str) -> None:
    key = f"{slashes}{RESERVED}x"
    text = f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved prefix '{RESERVED}'"
    assert_refused(client, text, client.register_system_shared_memory, "r", key, 8)


def test_what_is_not_shared_memory(client: Any, key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    path = Path("/dev/shm", key[1:])
    for make in (lambda: path.symlink_to(secret), path.mkdir, lambda: os.mkfifo(path)):
        make()
        assert_refused(client, "Unable to open shared memory region", client.register_system_shared_memory, "r", key, 8)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert_refused(client, "Unable to open shared memory region", client.register_system_shared_memory, "r", key, 8)


def test_regions_are_registered_once_and_inside_their_file(client: Any, key: str) -> None:
    made_file(key, bytes(64))
    for offset, size in ((0, 65), (64, 1), (60, 8), (0, 0), (1 << 62, 1 << 62)):
        assert_refused(
            client, "failed to register", client.register_system_shared_memory, "r", key, size, offset=offset
        )
    client.register_system_shared_memory("r", key, 32, offset=32)
    assert_refused(
        client, "shared memory region 'r' already in manager", client.register_system_shared_memory, "r", key, 8
    )
    assert_refused(
        client, "Unable to find system shared memory region: 'none'", client.get_system_shared_memory_status, "none"
    )
    client.unregister_system_shared_memory("none")
    assert list(regions(client)) == ["r"]


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (0, 40, "Invalid offset + byte size for shared memory region: 'r'"),
        (24, 16, "Invalid offset + byte size for shared memory region: 'r'"),
        (32, 8, "Invalid offset for shared memory region: 'r'"),
        (1 << 62, 8, "Invalid offset for shared memory region: 'r'"),
    ],
)
def test_nothing_outside_of_a_region_is_read_or_written(
    client: Any, key: str, offset: int, size: int, text: str
) -> None:
    path = made_file(key, b"x" * 128)
    client.register_system_shared_memory("r", key, 32, offset=32)
    module = library(client)
    given = module.InferInput("INPUT0", [1, size // 4], "INT32")
    given.set_shared_memory("r", size, offset=offset)
    assert_refused(client, text, client.infer, "same", [given])
    given.set_data_from_numpy(np.zeros((1, size // 4), np.int32))
    wanted = module.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory("r", size, offset=offset)
    assert_refused(client, text, client.infer, "same", [given], outputs=[wanted])
    assert path.read_bytes() == b"x" * 128


def test_an_output_that_does_not_fit(client: Any, key: str) -> None:
    path = made_file(key, b"x" * 32)
    client.register_system_shared_memory("r", key, 32)
    module = library(client)
    given, wanted = module.InferInput("INPUT0", [1, 4], "INT32"), module.InferRequestedOutput("OUTPUT0")
    given.set_data_from_numpy(np.zeros((1, 4), np.int32))
    wanted.set_shared_memory("r", 15)
    assert_refused(
        client, "should be at least 16 bytes to hold the results", client.infer, "same", [given], outputs=[wanted]
    )
    assert path.read_bytes() == b"x" * 32


def test_an_input_of_another_size_than_its_shape(client: Any, key: str) -> None:
    made_file(key, bytes(64))
    client.register_system_shared_memory("r", key, 64)
    given = library(client).InferInput("INPUT0", [1, 4], "INT32")
    given.set_shared_memory("r", 32)
    assert_refused(client, "input byte size mismatch", client.infer, "same", [given])
    given.set_shared_memory("gone", 16)
    assert_refused(client, "Unable to find shared memory region: 'gone'", client.infer, "same", [given])


def test_a_region_that_shrinks_does_not_kill_the_server(client: Any, key: str) -> None:
    path = made_file(key, bytes(1 << 20))
    client.register_system_shared_memory("r", key, 1 << 20)
    os.truncate(path, 100)
    module = library(client)
    given, wanted = module.InferInput("INPUT0", [1, 1 << 18], "INT32"), module.InferRequestedOutput("OUTPUT0")
    given.set_shared_memory("r", 1 << 20)
    assert_refused(client, "shorter than it was", client.infer, "same", [given])
    given = module.InferInput("INPUT0", [1, 64], "INT32")
    given.set_data_from_numpy(np.zeros((1, 64), np.int32))
    wanted.set_shared_memory("r", 256)
    assert_refused(client, "shorter than it was", client.infer, "same", [given], outputs=[wanted])
    assert path.stat().st_size == 100
    assert client.is_server_live()


def test_a_sparse_file_larger_than_the_machine(client: Any, key: str) -> None:
    path = made_file(key, b"")
    os.truncate(path, 1 << 42)
    client.register_system_shared_memory("r", key, 1 << 42)
    given = library(client).InferInput("INPUT0", [1, 1 << 40], "INT32")
    given.set_shared_memory("r", 1 << 42)
    assert_refused(client, "a request may read", client.infer, "same", [given])


def times_open(path: Path) -> int:
    """How often this process, which is the server, has a file open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link) == str(path) for link in links if os.path.islink(link))


def test_unregistered_regions_close_their_files(client: Any, key: str) -> None:
    path = made_file(key, bytes(64))
    for number in range(50):
        client.register_system_shared_memory(f"r{number}", key, 64)
    assert times_open(path) == 50
    client.unregister_system_shared_memory()
    assert times_open(path) == 0


@pytest.mark.parametrize(
    "document",
    [
        b"[]", b"{", {}, {"key": 1, "byte_size": 8}, {"key": "/a"}, {"key": "/a", "byte_size": -1},
        {"key": "/a", "byte_size": "8"}, {"key": "/a", "byte_size": True}, {"key": "/a", "byte_size": 8, "offset": 1.5},
        {"key": "\ud800", "byte_size": 8},
    ],
)  # fmt: skip
def test_wrong_documents(server: Serving, document: Any) -> None:
    status, answer = ask(server, "POST", "/v2/systemsharedmemory/region/r/register", document)
    assert status == 400 and answer["error"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": 5},
        {"shared_memory_region": "r"},
        {"shared_memory_region": "r", "shared_memory_byte_size": "8"},
        {"shared_memory_region": "r", "shared_memory_byte_size": -8},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": -1},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8, "binary_data_size": 8},
    ],
)
def test_wrong_parameters(server: Serving, parameters: dict[str, Any]) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "parameters": parameters}
    assert ask(server, "POST", "/v2/models/same/infer", {"inputs": [tensor]})[0] == 400
    if "binary_data_size" not in parameters:
        document = {
            "inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}],
            "outputs": [{"name": "OUTPUT0", "parameters": parameters}],
        }
        assert ask(server, "POST", "/v2/models/same/infer", document)[0] == 400


def test_nothing_works_where_it_is_not_allowed() -> None:
    with functions_served(MODELS) as running:
        for kind in (tritonclient.http, tritonclient.grpc):
            with kind.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
                for action, arguments in (
                    (client.register_system_shared_memory, ("r", "/x", 8)),
                    (client.unregister_system_shared_memory, ()),
                    (client.get_system_shared_memory_status, ()),
                    (client.get_cuda_shared_memory_status, ()),
                    (client.register_cuda_shared_memory, ("r", b"AAAA", 0, 8)),
                ):
                    assert_refused(client, "Client shared memory is disabled", action, *arguments)
                given = kind.InferInput("INPUT0", [1, 2], "INT32")
                given.set_shared_memory("r", 8)
                assert_refused(client, "Client shared memory is disabled", client.infer, "same", [given])


@pytest.mark.skipif("cuda" in sys.modules, reason="cuda-python is there")
def test_cuda_without_its_package_says_what_is_missing(client: Any) -> None:
    handle = b"A" * 88 if library(client) is tritonclient.http else bytes(64)
    probe = subprocess.run([sys.executable, "-c", "import cuda.bindings"], capture_output=True)
    if probe.returncode == 0:
        pytest.skip("cuda-python is there")
    assert_refused(client, "cuda-python", client.register_cuda_shared_memory, "r", handle, 0, 8)
