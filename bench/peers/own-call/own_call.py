# SPDX-License-Identifier: Apache-2.0
"""The peer `own-call`: a framework called in a loop, without any server.

    own_call.py FORMAT PORT ROWS,..  FILE          opens FILE, and calls it when told
    own_call.py FORMAT PORT ROWS,..  FILE SMALL    opens and calls SMALL, and opens FILE when told

It is told over HTTP, so that bench starts, holds and stops it like a server; but there is one thread, and it serves
nobody while it calls. Each body is the input's bytes.

    POST /answer           one call; its bytes
    POST /calls/SECONDS    calls for as long; how long each took, and the last answer, as JSON
    POST /loads/COUNT      opens FILE and calls it once, COUNT times; how long each opening and each call took, in turn,
                           and the last answer, as JSON

Each framework gets one thread, as a model of Headrace gets unless told otherwise.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np

Call = Callable[[np.ndarray], np.ndarray]


def open_onnx(file: str) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda image: session.run(None, {name: image})[0]


def open_pytorch(file: str) -> Call:
    import torch

    torch.set_num_threads(1)
    module = torch.jit.load(file, map_location="cpu").eval()

    def call(image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(image)).numpy()

    return call


def open_tensorflow(file: str) -> Call:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    loaded = tf.saved_model.load(file)
    function = loaded.signatures["serving_default"]
    (name,) = function.structured_input_signature[1]

    def call(image: np.ndarray, _keeps_variables_alive: object = loaded) -> np.ndarray:
        (output,) = function(**{name: tf.constant(image)}).values()
        return output.numpy()

    return call


def open_xgboost(file: str) -> Call:
    import xgboost

    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(file)
    return booster.inplace_predict


def open_lightgbm(file: str) -> Call:
    import lightgbm

    booster = lightgbm.Booster(model_file=file)
    return lambda rows: booster.predict(rows, num_threads=1)


OPENERS: dict[str, Callable[[str], Call]] = {
    "onnx": open_onnx,
    "pytorch": open_pytorch,
    "tensorflow": open_tensorflow,
    "xgboost": open_xgboost,
    "lightgbm": open_lightgbm,
}


class Model:
    def __init__(self, kind: str, file: str) -> None:
        self._open = OPENERS[kind]
        self._file = file
        self._call: Call | None = None

    def answer(self, image: np.ndarray) -> np.ndarray:
        if self._call is None:
            self._call = self._open(self._file)
        return self._call(image)

    def calls(self, image: np.ndarray, seconds: int) -> tuple[list[float], np.ndarray]:
        took, now = [], time.perf_counter()
        end = now + seconds
        answer = np.empty(0)
        while now < end:
            before = now
            answer = self.answer(image)
            now = time.perf_counter()
            took.append(now - before)
        return took, answer

    def loads(self, image: np.ndarray, count: int) -> tuple[list[float], np.ndarray]:
        took, answer = [], np.empty(0)
        for _ in range(count):
            before = time.perf_counter()
            call = self._open(self._file)
            opened = time.perf_counter()
            answer = call(image)
            took += [opened - before, time.perf_counter() - opened]
            del call
            gc.collect()
        return took, answer


def handler(model: Model, shape: list[int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200 if self.path == "/v2/health/ready" else 404, b"")

        def do_POST(self) -> None:
            # A copy that may be written to: PyTorch warns of others.
            body = bytearray(self.rfile.read(int(self.headers["Content-Length"])))
            image = np.frombuffer(body, dtype="<f4").reshape(shape)
            path, _, number = self.path[1:].partition("/")
            if path == "answer":
                self._reply(200, model.answer(image).tobytes())
                return
            repeat = {"calls": model.calls, "loads": model.loads}[path]
            took, answer = repeat(image, int(number))
            self._reply(200, json.dumps({"took": took, "answer": answer.ravel().tolist()}).encode())

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main(kind: str, port: str, shape: str, file: str, small: str | None = None) -> None:
    sizes = [int(size) for size in shape.split(",")]
    model = Model(kind, file)
    if small is None:
        model.answer(np.zeros(sizes, dtype=np.float32))
    else:
        Model(kind, small).answer(np.zeros((1, 16), dtype=np.float32))
    HTTPServer(("127.0.0.1", int(port)), handler(model, sizes)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
