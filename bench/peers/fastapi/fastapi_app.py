# SPDX-License-Identifier: Apache-2.0
"""The peer `fastapi`: v2 over HTTP as a FastAPI application, run by uvicorn in its own venv."""

import json

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

app = FastAPI()

MODELS = {
    "identity": lambda rows: rows,
    "first1000": lambda rows: rows.reshape(rows.shape[0], -1)[:, :1000],
}


class Tensor(BaseModel):
    """One tensor of a JSON body."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class InferRequest(BaseModel):
    """The JSON body of an inference request."""

    id: str | None = None
    inputs: list[Tensor]


class InferResponse(BaseModel):
    """The JSON body of an inference response."""

    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[Tensor]


@app.get("/v2/health/ready")
async def ready() -> dict[str, bool]:
    return {"ready": True}


@app.post("/v2/models/{name}/infer")
async def infer(name: str, request: Request) -> Response:
    header_length = request.headers.get("inference-header-content-length")
    body = await request.body()
    if header_length is None:
        return infer_json(name, body)
    return infer_binary(name, body, int(header_length))


def infer_json(name: str, body: bytes) -> Response:
    request = InferRequest.model_validate_json(body)
    tensor = request.inputs[0]
    result = run_model(name, np.array(tensor.data, dtype=np.float32).reshape(tensor.shape))
    output = Tensor(name="OUTPUT0", datatype="FP32", shape=list(result.shape), data=result.ravel().tolist())
    answer = InferResponse(id=request.id, model_name=name, model_version="1", outputs=[output])
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


def infer_binary(name: str, body: bytes, header_length: int) -> Response:
    tensor = json.loads(body[:header_length])["inputs"][0]
    rows = np.frombuffer(body, dtype=np.float32, offset=header_length).reshape(tensor["shape"])
    result = run_model(name, rows)
    raw = result.tobytes()
    output = {
        "name": "OUTPUT0",
        "datatype": "FP32",
        "shape": list(result.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    header = json.dumps({"model_name": name, "model_version": "1", "outputs": [output]}).encode()
    return Response(
        header + raw,
        media_type="application/octet-stream",
        headers={"Inference-Header-Content-Length": str(len(header))},
    )


def run_model(name: str, rows: np.ndarray) -> np.ndarray:
    model = MODELS.get(name)
    if model is None:
        raise HTTPException(404, f"unknown model {name!r}")
    return model(rows)
