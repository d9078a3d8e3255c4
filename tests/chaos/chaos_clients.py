# SPDX-License-Identifier: Apache-2.0
"""One client for each protocol, which sends a number that nobody else sends and gives back the number that it got.

    client = CLIENTS["v2 http"](ports, "echo")
    assert client.ask(17) == 17

`ask` ends in one of three ways: the answer; Told, an answer that says no; Cut, the end of the connection without one. A
client that was cut is closed, and the next one is made. Numbers stay below 2**24, which FP32 tells apart.
"""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from headrace.api.v1.messages import SERVICE, message_class

PATIENCE_SECONDS = 100.0
"""After which an answer counts as lost. Far above anything that a loaded machine does to one request."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]


# Made once: the schema is for one thread.
V1_HEADER, V1_REQUEST, V1_RESPONSE = map(message_class, ("InferRequestHeader", "InferRequest", "InferResponse"))


class Ports(NamedTuple):
    http: int
    grpc: int


class ErrorAnswer(Exception):
    """An answer, and it says no."""


class Cut(Exception):
    """The connection ended, or was refused, and there is no answer."""


class Lost(Exception):
    """Neither an answer nor an end. Never right."""


class Client(Protocol):
    def ask(self, value: int) -> int: ...
    def close(self) -> None: ...


class HttpClient:
    """HTTP/1.1 on a connection that is kept."""

    def __init__(self, ports: Ports, model: str) -> None:
        self.model = model
        self._connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=PATIENCE_SECONDS)

    def exchanged(self, path: str, body: bytes, **fields: str) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            self._connection.request(
                "POST", path, body, {name.replace("_", "-"): text for name, text in fields.items()}
            )
            response = self._connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise Lost(path) from None
        except (OSError, http.client.HTTPException) as error:
            raise Cut(repr(error)) from None
        if response.status != 200:
            raise ErrorAnswer(f"{response.status} {response.headers.get('NV-Status', '')} {content[:300]!r}")
        return response, content

    def close(self) -> None:
        self._connection.close()


class V2Http(HttpClient):
    def ask(self, value: int) -> int:
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        _, content = self.exchanged(f"/v2/models/{self.model}/infer", json.dumps({"inputs": [tensor]}).encode())
        return int(json.loads(content)["outputs"][0]["data"][0])


class V1Http(HttpClient):
    HEADER = 'batch_size: 1 input { name: "INPUT0" byte_size: 4 } output { name: "OUTPUT0" byte_size: 4 }'

    def ask(self, value: int) -> int:
        body = np.float32(value).tobytes()
        _, content = self.exchanged(f"/api/infer/{self.model}", body, NV_InferRequest=self.HEADER)
        return int(np.frombuffer(content[:4], np.float32)[0])


class Predict(HttpClient):
    def ask(self, value: int) -> int:
        _, content = self.exchanged(f"/predict/{self.model}", json.dumps({"inputs": [value]}).encode())
        return int(json.loads(content)["predictions"][0])


class OpenAiEvents(HttpClient):
    """A chat as a stream of events; the answer is what all of them say together."""

    def ask(self, value: int) -> int:
        messages = [{"role": "user", "content": f"the number is {value} and no other"}]
        body = json.dumps({"model": self.model, "messages": messages, "stream": True}).encode()
        _, content = self.exchanged("/v1/chat/completions", body)
        events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
        documents = [json.loads(event) for event in events if event != "[DONE]"]
        if any("error" in document for document in documents):
            raise ErrorAnswer(events[-1])
        if not events or events[-1] != "[DONE]":
            raise Cut("the stream ended before its last event")
        output = "".join(
            choice["delta"].get("content") or "" for document in documents for choice in document["choices"]
        )
        return int(output.removeprefix("the number is ").removesuffix(" and no other"))


class Grpc:
    """What the gRPC clients share: how an error is sorted."""

    def sorted_error(self, error: grpc.RpcError) -> Exception:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Lost(str(error))
        # grpcio says UNAVAILABLE for a connection that ended, too.
        return (
            Cut(str(error.details()))
            if code is grpc.StatusCode.UNAVAILABLE
            else ErrorAnswer(f"{code} {error.details()}")
        )


class V2Grpc(Grpc):
    def __init__(self, ports: Ports, model: str) -> None:
        self._model = model
        self._client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}", channel_args=OWN_CONNECTION)

    def ask(self, value: int) -> int:
        try:
            answer = self._client.infer(self._model, triton_inputs(value), client_timeout=PATIENCE_SECONDS)
        except InferenceServerException as error:
            if "DEADLINE_EXCEEDED" in str(error.status()):
                raise Lost(str(error)) from None
            raise (Cut if "UNAVAILABLE" in str(error.status()) else ErrorAnswer)(str(error)) from None
        return int(answer.as_numpy("OUTPUT0")[0, 0])

    def close(self) -> None:
        self._client.close()


def triton_inputs(value: int) -> list[Any]:
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return [tensor]


class V2Stream:
    """Triton's stream; one request at a time, so that the next answer is the next request's."""

    def __init__(self, ports: Ports, model: str) -> None:
        self._model = model
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}", channel_args=OWN_CONNECTION)
        self._client.start_stream(lambda result, error: self._answers.put(error or result))

    def ask(self, value: int) -> int:
        try:
            self._client.async_stream_infer(self._model, triton_inputs(value), request_id=str(value))
            answer = self._next()
        except InferenceServerException as error:
            raise Cut(str(error)) from None
        if isinstance(answer, InferenceServerException):
            ended = answer.status() is not None and "StatusCode." in str(answer.status())
            raise (Cut if ended else ErrorAnswer)(str(answer))
        assert answer.get_response().id == str(value)
        return int(answer.as_numpy("OUTPUT0")[0, 0])

    def _next(self) -> Any:
        # A stream that the server has ended without an error is told to nobody: its handler is done.
        for _ in range(int(PATIENCE_SECONDS)):
            try:
                return self._answers.get(timeout=1)
            except queue.Empty:
                if not self._client._stream._handler.is_alive() and self._answers.empty():
                    raise Cut("the stream has ended") from None
        raise Lost("a stream")

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


class V1Grpc(Grpc):
    def __init__(self, ports: Ports, model: str) -> None:
        self._model = model
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options=OWN_CONNECTION)
        self._infer = self._channel.unary_unary(f"/{SERVICE}/Infer")

    def ask(self, value: int) -> int:
        header = V1_HEADER(batch_size=1)
        header.input.add(name="INPUT0")
        header.output.add(name="OUTPUT0")
        request = V1_REQUEST(
            model_name=self._model, model_version=-1, meta_data=header, raw_input=[np.float32(value).tobytes()]
        )
        try:
            content = self._infer(request.SerializeToString(), timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            raise self.sorted_error(error) from None
        answer = V1_RESPONSE.FromString(content)
        if not answer.raw_output:
            raise ErrorAnswer(str(answer.request_status))
        return int(np.frombuffer(answer.raw_output[0], np.float32)[0])

    def close(self) -> None:
        self._channel.close()


class WebSocket:
    def __init__(self, ports: Ports, model: str) -> None:
        self._url = f"ws://127.0.0.1:{ports.http}/predict/{model}/stream"
        self._open = ExitStack()
        self._socket: Any = None

    def ask(self, value: int) -> int:
        try:
            if self._socket is None:
                opened = connect(self._url, open_timeout=PATIENCE_SECONDS, close_timeout=5)
                self._socket = self._open.enter_context(opened)
            self._socket.send(json.dumps({"inputs": [value], "id": str(value)}))
            answer = json.loads(self._socket.recv(timeout=PATIENCE_SECONDS))
        except TimeoutError:
            raise Lost(self._url) from None
        except (ConnectionClosed, InvalidHandshake, OSError) as error:
            raise Cut(repr(error)) from None
        if "error" in answer:
            raise ErrorAnswer(str(answer))
        assert answer["id"] == str(value)
        return int(answer["predictions"][0])

    def close(self) -> None:
        self._open.close()


class PredictStream(Grpc):
    """The gRPC stream of `/predict`: bytes by hand, field 1 a packed list of floats."""

    def __init__(self, ports: Ports, model: str) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options=OWN_CONNECTION)
        self._open = self._channel.stream_stream("/InferenceService/PredictStream")
        self._metadata = [("model", model)]
        self._begin()

    def _begin(self) -> None:
        self._asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self._open(self._requests(self._asked), metadata=self._metadata)

    @staticmethod
    def _requests(asked: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
        while (message := asked.get()) is not None:
            yield message

    def ask(self, value: int) -> int:
        self._asked.put(b"\x0a\x04" + np.float32(value).tobytes())
        try:
            answer = next(self._answers)
        except StopIteration:
            raise Cut("the stream has ended") from None
        except grpc.RpcError as error:
            self._asked.put(None)
            self._begin()  # an error ends a stream: the next request is on another
            raise self.sorted_error(error) from None
        assert answer[:2] == b"\x0a\x04"
        return int(np.frombuffer(answer[2:6], np.float32)[0])

    def close(self) -> None:
        self._asked.put(None)
        self._answers.cancel()
        self._channel.close()


CLIENTS: dict[str, Callable[[Ports, str], Client]] = {
    "v2 http": V2Http,
    "v2 grpc": V2Grpc,
    "v2 stream": V2Stream,
    "v1 http": V1Http,
    "v1 grpc": V1Grpc,
    "predict": Predict,
    "predict stream": PredictStream,
    "websocket": WebSocket,
    "openai events": OpenAiEvents,
}
