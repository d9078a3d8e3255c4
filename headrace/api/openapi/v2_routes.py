# SPDX-License-Identifier: Apache-2.0
"""OpenAPI operations of the v2 routes: Triton's protocol and its extensions."""

from __future__ import annotations

from headrace.api.openapi.operations import (
    BINARY,
    EVENTS,
    Operation,
    OperationTable,
    Schema,
    header,
    json_content,
    operation,
    query,
    ref,
    response_object,
)

HEALTH = "Health"
MODELS = "Models"
INFERENCE = "Inference"
REPOSITORY = "Model repository"
STATISTICS = "Statistics"
SETTINGS = "Trace and log settings"
MEMORY = "Shared memory"

INFER_FAILURES = (403, 404, 409, 429, 499, 501, 504)

LENGTH_FIELD = "Inference-Header-Content-Length"
_LENGTH = header(
    LENGTH_FIELD,
    "The length of the JSON, if binary tensors follow it. 0: the body is only the one input.",
    {"type": "string", "pattern": "^[0-9]{1,12}$"},
)
_REQUEST_BINARY = {BINARY: {"schema": {"description": "JSON, then binary tensors; or one raw tensor."}}}
_MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


def v2_table() -> OperationTable:
    """Return the operations by (method, path)."""
    table: dict[tuple[str, str], Operation] = {**_server(), **_repository(), **_settings(), **_memory()}
    for path in _MODEL_PATHS:
        table |= _model(path)
    return table


def infer_operation(request: Schema, response: Schema, **more: object) -> Operation:
    """Return the inference operation, with the schemas of all models or of one; `more` goes into the request's content."""
    binary_answer = {BINARY: {"schema": {"description": "JSON, then the requested binary tensors."}}}
    return operation(
        INFERENCE,
        "Run inference",
        "JSON, or JSON followed by binary tensors. The body may be compressed with gzip or deflate.",
        body={**json_content(request, **more), **_REQUEST_BINARY},
        parameters=[_LENGTH],
        failing=INFER_FAILURES,
        answers={
            "200": response_object(
                "The model's response.",
                {**json_content(response), **binary_answer},
                {
                    LENGTH_FIELD: {
                        "description": "The length of the JSON, if binary tensors follow it.",
                        "schema": {"type": "string"},
                    }
                },
            )
        },
    )


def generate_operation(request: Schema, response: Schema, *, stream: bool, **more: object) -> Operation:
    """Return the operation `generate` or `generate_stream`, of all models or of one."""
    content = {EVENTS: {"schema": {"description": "Server-sent events."}}} if stream else json_content(response)
    text = 'One event per response: `data: {...}`, or `data: {"error": ...}`.' if stream else "The outputs by name."
    return operation(
        INFERENCE,
        "Generate as a stream" if stream else "Generate",
        "A plain JSON object in, a plain JSON object out"
        + (" for each response of the model." if stream else "; for models that send one response."),
        body=json_content(request, **more),
        failing=INFER_FAILURES,
        answers={"200": response_object(text, content)},
    )


def _server() -> OperationTable:
    yes_no = {"200": response_object("Yes."), "400": response_object("No.")}
    return {
        ("GET", "/v2/health/live"): operation(HEALTH, "Is the server live?", answers=yes_no, failing=(403,)),
        ("GET", "/v2/health/ready"): operation(
            HEALTH, "Is the server ready?", "Not while models load or the server is stopping.",
            answers=yes_no, failing=(403,),
        ),
        ("GET", "/v2"): operation(
            MODELS, "Server metadata", "Its name, its version and its protocol extensions.",
            answers={"200": response_object("The metadata.", json_content(ref("ServerMetadata")))}, failing=(403,),
        ),
        ("GET", "/v2/models/stats"): operation(
            STATISTICS, "Statistics of all models",
            answers={"200": response_object("One entry for each version.", json_content(ref("ModelStatistics")))},
            failing=(403,),
        ),
    }  # fmt: skip


def _model(path: str) -> OperationTable:
    which = "this version of a model" if "{version}" in path else "a model"
    gone = (403, 404)
    generate = {"request": ref("GenerateRequest"), "response": ref("GenerateResponse")}
    return {
        ("GET", path): operation(
            MODELS, f"Metadata of {which}", failing=gone,
            answers={"200": response_object("Names, types and shapes.", json_content(ref("ModelMetadata")))},
        ),
        ("GET", f"{path}/config"): operation(
            MODELS, f"Configuration of {which}", failing=gone,
            answers={"200": response_object("The configuration, completed.", json_content(ref("ModelConfig")))},
        ),
        ("GET", f"{path}/ready"): operation(
            HEALTH, f"Is {which} ready?", failing=(403,),
            answers={"200": response_object("Yes."), "400": response_object("No, or the name is invalid.")},
        ),
        ("GET", f"{path}/stats"): operation(
            STATISTICS, f"Statistics of {which}", failing=gone,
            answers={"200": response_object("One entry for each version.", json_content(ref("ModelStatistics")))},
        ),
        ("POST", f"{path}/infer"): infer_operation(ref("InferRequest"), ref("InferResponse")),
        ("POST", f"{path}/generate"): generate_operation(**generate, stream=False),
        ("POST", f"{path}/generate_stream"): generate_operation(**generate, stream=True),
    }  # fmt: skip


def _repository() -> OperationTable:
    base = "/v2/repository/models/{model}"
    return {
        ("POST", "/v2/repository/index"): operation(
            REPOSITORY, "List the models", "All models of the repository and the states of their versions.",
            body=json_content(ref("RepositoryIndexRequest")), body_needed=False, failing=(403,),
            answers={"200": response_object("One entry for each version.", json_content(ref("RepositoryIndex")))},
        ),
        ("POST", f"{base}/load"): operation(
            REPOSITORY, "Load or reload a model", "Needs `--model-control-mode explicit`.",
            body=json_content(ref("LoadRequest")), body_needed=False, failing=(403, 404, 409),
            answers={"200": response_object("The model is loaded.")},
        ),
        ("POST", f"{base}/unload"): operation(
            REPOSITORY, "Unload a model", "Needs `--model-control-mode explicit`.",
            body=json_content(ref("UnloadRequest")), body_needed=False, failing=(403, 404, 409),
            answers={"200": response_object("The model is unloading, or was not loaded.")},
        ),
        ("POST", "/v1/models/{model}/sleep"): operation(
            REPOSITORY, "Put a model to sleep",
            "Its memory is given back when the requests in flight are done. The next request wakes it. For language models "
            "and PyTorch models.",
            body=json_content(ref("SleepRequest")), body_needed=False, failing=(403, 404, 409),
            parameters=[query("level", "In place of the body.", {"type": "integer", "enum": [1, 2], "default": 1})],
            answers={"200": response_object("All versions are asleep.", json_content(ref("SleepReport")))},
        ),
        ("POST", "/v1/models/{model}/wake"): operation(
            REPOSITORY, "Wake a model", failing=(403, 404, 409),
            answers={"200": response_object("All versions are awake.", json_content(ref("SleepReport")))},
        ),
    }  # fmt: skip


def _show_trace() -> Operation:
    return operation(
        SETTINGS, "Show the trace settings", failing=(403, 404),
        answers={"200": response_object("The current settings.", json_content(ref("TraceSettings")))},
    )  # fmt: skip


def _change_trace() -> Operation:
    return operation(
        SETTINGS, "Change the trace settings", body=json_content(ref("TraceChanges")), body_needed=False, failing=(403, 404),
        answers={"200": response_object("The changed settings.", json_content(ref("TraceSettings")))},
    )  # fmt: skip


def _settings() -> OperationTable:
    shown = {"200": response_object("The current settings.", json_content(ref("LogSettings")))}
    return {
        ("GET", "/v2/trace/setting"): _show_trace(),
        ("POST", "/v2/trace/setting"): _change_trace(),
        ("GET", "/v2/models/{model}/trace/setting"): _show_trace(),
        ("POST", "/v2/models/{model}/trace/setting"): _change_trace(),
        ("GET", "/v2/logging"): operation(SETTINGS, "Show the log settings", answers=shown, failing=(403,)),
        ("POST", "/v2/logging"): operation(
            SETTINGS, "Change the log settings", body=json_content(ref("LogChanges")), body_needed=False, answers=shown,
            failing=(403,),
        ),
    }  # fmt: skip


def _memory() -> OperationTable:
    table: dict[tuple[str, str], Operation] = {}
    note = "Needs a server with `--allow-client-shm`."
    failing = (403, 404, 409, 429, 501)
    for kind, name, schema in (("system", "System", "POSIX"), ("cuda", "Cuda", "CUDA")):
        base = f"/v2/{kind}sharedmemory"
        region = f"{base}/region/{{name}}"
        shown = {"200": response_object("The regions.", json_content(ref(f"{name}MemoryStatus")))}
        gone = {"200": response_object("The region is unregistered, or was not registered.")}
        table[("GET", f"{base}/status")] = operation(
            MEMORY, f"List the {schema} regions", note, answers=shown, failing=failing
        )
        table[("GET", f"{region}/status")] = operation(
            MEMORY, f"Show a {schema} region", note, answers=shown, failing=failing
        )
        table[("POST", f"{region}/register")] = operation(
            MEMORY, f"Register a {schema} region", note, body=json_content(ref(f"{name}MemoryRegistration")),
            answers={"200": response_object("The region is registered.")}, failing=failing,
        )  # fmt: skip
        table[("POST", f"{region}/unregister")] = operation(
            MEMORY, f"Unregister a {schema} region", note, answers=gone, failing=failing
        )
        table[("POST", f"{base}/unregister")] = operation(
            MEMORY, f"Unregister all {schema} regions", note, answers=gone, failing=failing
        )
    return table
