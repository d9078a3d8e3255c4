# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own old client against a server; run by `test_v1_real_client` in an environment of its own, as a script.

python real_client.py HOST:PORT

Needs `tensorrtserver==1.11.0`, `numpy<1.25`, `protobuf<3.21`, `setuptools<60`, and OpenSSL 1.1; on other machines than
x86-64, an emulator such as qemu-user. Prints a line for each step, and fails with the first that is wrong.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from tensorrtserver.api import (
    InferContext,
    InferenceServerException,
    InferRequestHeader,
    ModelControlContext,
    ModelRepositoryContext,
    ProtocolType,
    ServerHealthContext,
    ServerStatusContext,
)

np.object = object  # the client is from before numpy dropped it
RAW, CLASS = InferContext.ResultFormat.RAW, InferContext.ResultFormat.CLASS


def same(given, expected):
    if given != expected:
        raise SystemExit(f"expected {expected!r}, got {given!r}")
    print("ok", repr(given)[:100], flush=True)


def message_of(action):
    try:
        action()
    except InferenceServerException as error:
        if error.server_id() != "inference:0" or error.request_id() < 1:
            raise SystemExit("an error without its server and number") from error
        return error.message()
    raise SystemExit("it should have failed")


def questions(url, protocol):
    health = ServerHealthContext(url, protocol)
    same((health.is_live(), health.is_ready()), (True, False))
    status = ServerStatusContext(url, protocol, "pair").get_server_status()
    same((status.id, status.version, list(status.model_status)), ("inference:0", "0.7.0", ["pair"]))
    unknown = "no status available for unknown model 'nope'"
    same(message_of(ServerStatusContext(url, protocol, "nope").get_server_status), unknown)
    index = ModelRepositoryContext(url, protocol).get_model_repository_index()
    same({"pair", "spare"} <= {model.name for model in index.models}, True)


def inference(url, protocol):
    a = np.arange(4, dtype=np.int32)
    b = a.reshape(2, 2) * 10
    context = InferContext(url, protocol, "pair", -1)
    result = context.run({"A": [a, a + 1], "B": [b, b + 1]}, {"X": RAW, "Y": RAW}, 2)
    same([row.tolist() for row in result["X"]], [a.tolist(), (a + 1).tolist()])
    same([row.tolist() for row in result["Y"]], [b.tolist(), (b + 1).tolist()])
    same(context.get_last_request_model_version(), 1)
    image = np.arange(192, dtype=np.float32).reshape(3, 8, 8)
    result = InferContext(url, protocol, "resnet", 1).run({"input": [image, -image]}, {"output": (CLASS, 2)}, 2)
    rows = [[(9, 9.0, ""), (8, 8.0, "label 8")], [(0, 0.0, "label 0"), (1, -1.0, "label 1")]]
    same([[tuple(cell) for cell in row] for row in result["output"]], rows)
    shape = np.arange(6, dtype=np.float32).reshape(3, 2)
    result = InferContext(url, protocol, "variable").run({"A": [shape]}, {"X": RAW}, 1)
    same(result["X"][0].tolist(), shape.tolist())
    words = np.array(["one", "", "three"], dtype=object)
    result = InferContext(url, protocol, "words").run({"A": [words]}, {"X": RAW}, 1)
    same(result["X"][0].tolist(), [b"one", b"", b"three"])
    told, done = [], threading.Event()

    def answered(context, number):
        told.append(context.get_async_run_results(number)["X"][0].tolist())
        done.set()

    context.async_run(answered, {"A": [a], "B": [b]}, {"X": RAW}, 1)
    same((done.wait(60), told), (True, [a.tolist()]))


def sequences(url, protocol, streaming):
    number = np.array([5], dtype=np.int32)
    context = InferContext(url, protocol, "stateful", -1, correlation_id=77 + streaming, streaming=streaming)
    flags = (InferRequestHeader.FLAG_SEQUENCE_START, 0, InferRequestHeader.FLAG_SEQUENCE_END)
    results = [context.run({"A": [number + i]}, {"X": RAW}, 1, flag)["X"][0][0] for i, flag in enumerate(flags)]
    same([int(result) for result in results], [5, 6, 7])
    text = message_of(lambda: context.run({"A": [number]}, {"X": RAW}, 1))
    same("must specify the START flag" in text, True)


def control(url, protocol):
    number = np.array([3], dtype=np.int32)
    models = ModelControlContext(url, protocol)
    models.load("spare")
    same(InferContext(url, protocol, "spare").run({"A": [number]}, {"X": RAW}, 1)["X"][0].tolist(), [3])
    models.unload("spare")
    same(message_of(lambda: models.load("nix")), "failed to load 'nix', failed to poll from model repository")


def main(url):
    for protocol in (ProtocolType.HTTP, ProtocolType.GRPC):
        print(protocol, flush=True)
        questions(url, protocol)
        inference(url, protocol)
        sequences(url, protocol, False)
        control(url, protocol)
    sequences(url, ProtocolType.GRPC, True)
    print("all is well")


if __name__ == "__main__":
    main(sys.argv[1])
