# SPDX-License-Identifier: Apache-2.0
"""The peer `fastapi-seed`: the FastAPI inference server of the page "Inference Serving", as printed there.

Mended only where it does not run on today's packages or would not run at all: `threading` and `Path` are imported, and
`validator`, which pydantic has replaced, is `field_validator`.
"""

import threading
import time
from pathlib import Path
from typing import List, Optional  # noqa: UP035

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, field_validator

app = FastAPI(title="Codex ML Inference API")


class PredictionRequest(BaseModel):
    """Request model for predictions."""

    inputs: List[float]  # noqa: UP006
    model_version: Optional[str] = None  # noqa: UP045

    @field_validator("inputs")
    @classmethod
    def validate_inputs(cls, v):
        """Validate input bounds."""
        if len(v) == 0:
            raise ValueError("inputs cannot be empty")
        if len(v) > 10000:
            raise ValueError("inputs exceeds maximum length")
        return v


class PredictionResponse(BaseModel):
    """Response model for predictions."""

    predictions: List[float]  # noqa: UP006
    model_version: str
    latency_ms: float


class ModelManager:
    """Manage model loading and inference."""

    def __init__(self):
        self._model = None
        self._version = None
        self._lock = threading.Lock()

    def load_model(self, path: str, version: str) -> None:
        """Load model from path."""
        if not Path(path).exists():
            raise ValueError(f"Model path not found: {path}")
        with self._lock:
            self._model = torch.jit.load(path)
            self._model.eval()
            self._version = version

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run inference."""
        if self._model is None:
            raise RuntimeError("Model not loaded")
        with torch.no_grad():
            return self._model(inputs)

    @property
    def version(self) -> str:
        return self._version or "unknown"


model_manager = ModelManager()


@app.on_event("startup")
async def startup():
    """Load model on startup."""
    model_manager.load_model("models/production/model.pt", "v1.0.0")


@app.post("/predict", response_model=PredictionResponse)
async def predict(request: PredictionRequest) -> PredictionResponse:
    """Make predictions."""
    start = time.time()
    try:
        # Convert to tensor
        inputs = torch.tensor(request.inputs).unsqueeze(0)
        # Run inference
        predictions = model_manager.predict(inputs)
        latency = (time.time() - start) * 1000
        return PredictionResponse(
            predictions=predictions.squeeze().tolist(),
            model_version=model_manager.version,
            latency_ms=latency,
        )
    except Exception as e:
        raise HTTPException(status_code=500, detail=str(e)) from e


@app.get("/healthz")
async def health():
    """Health check endpoint."""
    if model_manager._model is None:
        raise HTTPException(status_code=503, detail="Model not loaded")
    return {"status": "healthy", "model_version": model_manager.version}
