# SPDX-License-Identifier: Apache-2.0
"""What is said of the routes of v2: Triton's protocol of today, and its extensions."""

from __future__ import annotations

from headrace.api.openapi.describing import (
    BINARY,
    EVENTS,
    Operation,
    Schema,
    Table,
    answer,
    header,
    json_of,
    operation,
    ref,
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
    "The length of the JSON, where binary tensors follow it. 0: the body is nothing but the one input.",
    {"type": "string", "pattern": "^[0-9]{1,12}$"},
)
_REQUEST_BINARY = {BINARY: {"schema": {"description": "JSON, then binary tensors; or one raw tensor."}}}
_MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


def v2_table() -> Table:
    """By (method, path)."""
    table: dict[tuple[str, str], Operation] = {**_server(), **_repository(), **_settings(), **_memory()}
    for path in _MODEL_PATHS:
        table |= _model(path)
    return table


def infer_operation(request: Schema, response: Schema, **more: object) -> Operation:
    """Inference, with the schemas of all models or of one; `more` goes into the JSON content of the request."""
    binary_answer = {BINARY: {"schema": {"description": "JSON, then the binary tensors that were asked for."}}}
    return operation(
        INFERENCE,
        "Compute one request",
        "JSON, or JSON followed by binary tensors. The body may be compressed with gzip or deflate.",
        body={**json_of(request, **more), **_REQUEST_BINARY},
        parameters=[_LENGTH],
        failing=INFER_FAILURES,
        answers={
            "200": answer(
                "What the model computed.",
                {**json_of(response), **binary_answer},
                {
                    LENGTH_FIELD: {
                        "description": "The length of the JSON, where binary tensors follow it.",
                        "schema": {"type": "string"},
                    }
                },
            )
        },
    )


def generate_operation(request: Schema, response: Schema, *, stream: bool, **more: object) -> Operation:
    """`generate` or `generate_stream`, of all models or of one."""
    content = {EVENTS: {"schema": {"description": "Server-sent events."}}} if stream else json_of(response)
    text = 'Each answer as an event: `data: {...}`, or `data: {"error": ...}`.' if stream else "The outputs by name."
    return operation(
        INFERENCE,
        "Generate, answer by answer" if stream else "Generate",
        "A plain JSON object in, a plain JSON object out"
        + (" for each answer of the model." if stream else "; for models that answer once."),
        body=json_of(request, **more),
        failing=INFER_FAILURES,
        answers={"200": answer(text, content)},
    )


def _server() -> Table:
    yes_no = {"200": answer("Yes."), "400": answer("No.")}
    return {
        ("GET", "/v2/health/live"): operation(HEALTH, "Does the server answer?", answers=yes_no, failing=(403,)),
        ("GET", "/v2/health/ready"): operation(
            HEALTH, "Can all models be asked?", "False while models load, and once the server is stopping.",
            answers=yes_no, failing=(403,),
        ),
        ("GET", "/v2"): operation(
            MODELS, "What is this server?", "Its name, its version and the extensions of the protocol that it has.",
            answers={"200": answer("The server.", json_of(ref("ServerMetadata")))}, failing=(403,),
        ),
        ("GET", "/v2/models/stats"): operation(
            STATISTICS, "What have all models done?",
            answers={"200": answer("One entry for each version.", json_of(ref("ModelStatistics")))}, failing=(403,),
        ),
    }  # fmt: skip


def _model(path: str) -> Table:
    which = "this version of a model" if "{version}" in path else "a model"
    gone = (403, 404)
    generate = {"request": ref("GenerateRequest"), "response": ref("GenerateResponse")}
    return {
        ("GET", path): operation(
            MODELS, f"What does {which} take and give?", failing=gone,
            answers={"200": answer("Names, types and shapes.", json_of(ref("ModelMetadata")))},
        ),
        ("GET", f"{path}/config"): operation(
            MODELS, f"How is {which} configured?", failing=gone,
            answers={"200": answer("The configuration, completed.", json_of(ref("ModelConfig")))},
        ),
        ("GET", f"{path}/ready"): operation(
            HEALTH, f"Can {which} be asked?", failing=(403,),
            answers={"200": answer("Yes."), "400": answer("No; or the name is not one.")},
        ),
        ("GET", f"{path}/stats"): operation(
            STATISTICS, f"What has {which} done?", failing=gone,
            answers={"200": answer("One entry for each version.", json_of(ref("ModelStatistics")))},
        ),
        ("POST", f"{path}/infer"): infer_operation(ref("InferRequest"), ref("InferResponse")),
        ("POST", f"{path}/generate"): generate_operation(**generate, stream=False),
        ("POST", f"{path}/generate_stream"): generate_operation(**generate, stream=True),
    }  # fmt: skip


def _repository() -> Table:
    base = "/v2/repository/models/{model}"
    return {
        ("POST", "/v2/repository/index"): operation(
            REPOSITORY, "Which models are there?", "Every model of the repository and where its versions stand.",
            body=json_of(ref("RepositoryIndexRequest")), body_needed=False, failing=(403,),
            answers={"200": answer("One entry for each version.", json_of(ref("RepositoryIndex")))},
        ),
        ("POST", f"{base}/load"): operation(
            REPOSITORY, "Load a model", "Or load it anew. Needs `--model-control-mode explicit`.",
            body=json_of(ref("LoadRequest")), body_needed=False, failing=(403, 404, 409),
            answers={"200": answer("It is loaded.")},
        ),
        ("POST", f"{base}/unload"): operation(
            REPOSITORY, "Unload a model", "Needs `--model-control-mode explicit`.",
            body=json_of(ref("UnloadRequest")), body_needed=False, failing=(403, 404, 409),
            answers={"200": answer("It is going, or was not there.")},
        ),
    }  # fmt: skip


def _trace_shown() -> Operation:
    return operation(
        SETTINGS, "Which requests are traced?", failing=(403, 404),
        answers={"200": answer("The settings in force.", json_of(ref("TraceSettings")))},
    )  # fmt: skip


def _trace_changed() -> Operation:
    return operation(
        SETTINGS, "Trace other requests", body=json_of(ref("TraceChanges")), body_needed=False, failing=(403, 404),
        answers={"200": answer("The settings as they are now.", json_of(ref("TraceSettings")))},
    )  # fmt: skip


def _settings() -> Table:
    shown = {"200": answer("The settings in force.", json_of(ref("LogSettings")))}
    return {
        ("GET", "/v2/trace/setting"): _trace_shown(),
        ("POST", "/v2/trace/setting"): _trace_changed(),
        ("GET", "/v2/models/{model}/trace/setting"): _trace_shown(),
        ("POST", "/v2/models/{model}/trace/setting"): _trace_changed(),
        ("GET", "/v2/logging"): operation(SETTINGS, "What is logged?", answers=shown, failing=(403,)),
        ("POST", "/v2/logging"): operation(
            SETTINGS, "Log something else", body=json_of(ref("LogChanges")), body_needed=False, answers=shown,
            failing=(403,),
        ),
    }  # fmt: skip


def _memory() -> Table:
    table: dict[tuple[str, str], Operation] = {}
    off = "Clients may do so only on a server with `--allow-client-shm`."
    failing = (403, 404, 409, 429, 501)
    for kind, name, schema in (("system", "System", "POSIX"), ("cuda", "Cuda", "CUDA")):
        base = f"/v2/{kind}sharedmemory"
        region = f"{base}/region/{{name}}"
        shown = {"200": answer("The regions.", json_of(ref(f"{name}MemoryStatus")))}
        gone = {"200": answer("It is let go, or was not there.")}
        table[("GET", f"{base}/status")] = operation(
            MEMORY, f"Which {schema} regions are registered?", off, answers=shown, failing=failing
        )
        table[("GET", f"{region}/status")] = operation(
            MEMORY, f"What is this {schema} region?", off, answers=shown, failing=failing
        )
        table[("POST", f"{region}/register")] = operation(
            MEMORY, f"Register a {schema} region", off, body=json_of(ref(f"{name}MemoryRegistration")),
            answers={"200": answer("It can be used.")}, failing=failing,
        )  # fmt: skip
        table[("POST", f"{region}/unregister")] = operation(
            MEMORY, f"Let a {schema} region go", off, answers=gone, failing=failing
        )
        table[("POST", f"{base}/unregister")] = operation(
            MEMORY, f"Let all {schema} regions go", off, answers=gone, failing=failing
        )
    return table
