# SPDX-License-Identifier: Apache-2.0
"""The peer `grpc-aio`: v2 over gRPC, written the usual grpc.aio way."""

import sys

import grpc
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

MODELS = {
    "identity": lambda rows: rows,
    "first1000": lambda rows: rows.reshape(rows.shape[0], -1)[:, :1000],
}


class InferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """ModelInfer and ServerReady: nothing else is asked for by the workloads."""

    async def ServerReady(self, request, context):  # noqa: N802 (the protocol's name)
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelInfer(self, request, context):  # noqa: N802 (the protocol's name)
        model = MODELS.get(request.model_name)
        if model is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {request.model_name!r}")
        tensor = request.inputs[0]
        if tensor.name != "INPUT0" or tensor.datatype != "FP32":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected one FP32 tensor named INPUT0")
        rows = np.frombuffer(request.raw_input_contents[0], dtype=np.float32).reshape(tensor.shape)
        result = model(rows)
        name = request.model_name
        response = service_pb2.ModelInferResponse(model_name=name, model_version="1", id=request.id)
        response.outputs.add(name="OUTPUT0", datatype="FP32", shape=result.shape)
        response.raw_output_contents.append(result.tobytes())
        return response


async def serve(port: int) -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceService(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    # grpc.aio costs a few per cent less on uvloop than on asyncio's own loop.
    uvloop.run(serve(int(sys.argv[1])))
