# SPDX-License-Identifier: Apache-2.0
"""What the tests of the old protocol share: a repository, a site that serves it, and a plain HTTP request."""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from headrace.api.shared_memory import SharedMemory
from headrace.api.v1.grpc import V1Grpc
from headrace.api.v1.http import V1Http
from headrace.api.v1.messages import message_class
from headrace.api.v1.status import V1Settings, V1Statistics
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.grpc.services import Services
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving

MODELS = {
    # The seed's example, with a tenth of its size.
    "resnet": """
        platform: "identity" max_batch_size: 8
        input { name: "input" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 8, 8 ] }
        output { name: "output" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" }
        parameters { key: "first" value { string_value: "10" } }""",
    "pair": """
        backend: "identity" max_batch_size: 4
        input { name: "A" data_type: TYPE_INT32 dims: [ 4 ] } input { name: "B" data_type: TYPE_INT32 dims: [ 2, 2 ] }
        output { name: "X" data_type: TYPE_INT32 dims: [ 4 ] } output { name: "Y" data_type: TYPE_INT32 dims: [ 2, 2 ] }""",
    "single": """
        backend: "identity" max_batch_size: 0
        input { name: "A" data_type: TYPE_FP16 dims: [ 3 ] }
        output { name: "X" data_type: TYPE_FP16 dims: [ 3 ] }""",
    "variable": """
        backend: "identity" max_batch_size: 4
        input { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] }
        output { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] }""",
    "words": """
        backend: "identity" max_batch_size: 4
        input { name: "A" data_type: TYPE_STRING dims: [ -1 ] }
        output { name: "X" data_type: TYPE_STRING dims: [ -1 ] }""",
    "stateful": """
        backend: "identity" max_batch_size: 2 sequence_batching { direct { } }
        input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }""",
    "spare": """
        backend: "identity" max_batch_size: 1
        input { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }
        output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }""",
    "broken": 'backend: "identity" max_batch_size: 1 dynamic_batchin { }',
}
LOADED = ("resnet", "pair", "single", "variable", "words", "stateful", "broken")
LABELS = [f"label {number}" for number in range(9)]
"""One fewer than there are classes."""


def make_repository(folder: Path) -> Path:
    for name, config in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}\n')
    (folder / "resnet" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    (folder / "resnet" / "config.pbtxt").write_text(
        f'name: "resnet"\n{MODELS["resnet"].replace("platform:", "backend:")}\nversion_policy {{ all {{ }} }}\n'
    )
    (folder / "resnet" / "3").mkdir()
    return folder


class TrtisSite:
    """Made in the server's loop by `build`; what it is made of stays at hand."""

    engine: Engine

    def __init__(
        self, folder: Path, *, memory: bool = True, start: bool = True, settings: V1Settings | None = None
    ) -> None:
        self._folder = folder
        self._start = start
        self.shared = folder.parent / "shm"
        """Stands in for /dev/shm."""
        self.shared.mkdir(exist_ok=True)
        self.memory = SharedMemory(allowed=True, folder=self.shared) if memory else None
        self.accounts = V1Statistics(settings or V1Settings(version="0.7.0"))

    async def build(self) -> Site:
        control = RepositorySettings(mode="explicit", load_models=LOADED, exit_on_error=False)
        self.engine = open_engine(EngineSettings(repositories=(self._folder,), repository=control, gpus=0))
        if self._start:
            await self.engine.start()
        routes, services = Routes(), Services()
        V1Http(self.engine.plane, self.accounts, self.memory).add_to(routes)
        V1Grpc(self.engine.plane, self.accounts, self.memory).add_to(services)
        return Site(routes, services=services)


@dataclass
class Answer:
    code: int
    body: bytes
    fields: dict[str, str]

    @property
    def status(self) -> Any:
        """NV-Status as a message."""
        return text_format.Parse(self.fields["nv-status"], message_class("RequestStatus")())

    @property
    def outcome(self) -> tuple[int, str, str]:
        """HTTP code, and the code and text of NV-Status."""
        status = self.status
        name = status.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_number[status.code].name
        return self.code, name, status.msg


def ask(
    server: Serving, method: str, path: str, body: bytes | None = None, header: str | bytes | None = None
) -> Answer:
    """One request; `header` is NV-InferRequest."""
    fields = {} if header is None else {"NV-InferRequest": header}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body, fields)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()})
    finally:
        connection.close()


def infer(server: Serving, model: str, body: bytes, header: str | bytes | None, query: str = "") -> Answer:
    return ask(server, "POST", f"/api/infer/{model}{query}", body, header)
