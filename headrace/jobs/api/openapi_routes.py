# SPDX-License-Identifier: Apache-2.0
"""What is said of the routes of the gateway: TAO's job API. Used by `api.jobs.described`, which serves the document."""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.describing import JSON, TEXT, Operation, Schema, Table, answer, json_of, query, ref

ACCESS, WORKSPACES, EXPERIMENTS, JOBS = "Access", "Workspaces", "Experiments", "Jobs"
SERVICES, HEALTH, ABOUT_ITSELF = "Inference microservices", "Health", "About"
ABOUT = (
    "Headrace's gateway: models as inference microservices behind a job API with login. Log in with a key and an "
    "organisation, send the token as `Authorization: Bearer TOKEN`. Errors are JSON, "
    '`{"error_desc": text, "error_code": number}`. Bodies are read as JSON whatever their Content-Type. Every GET answers '
    "HEAD, too. `/api/v2` has what NVIDIA's newest client asks for."
)

_V1, _V2 = "/api/v1/orgs/{org}", "/api/v2/orgs/{org}"
_TEXT: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": "boolean"}
_THING: Schema = {"type": "object"}
_ID: Schema = {"type": "string", "format": "uuid"}
_MAYBE_ID: Schema = {"type": ["string", "null"], "format": "uuid"}
_TIME: Schema = {"type": "string", "format": "date-time"}

PATH_SCHEMAS: dict[str, Schema] = {
    "org": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,255}$"},
    "workspace": _ID,
    "experiment": _ID,
    "job": _ID,
}
"""By the names that placeholders have."""

_ERRORS = {
    400: "The request is wrong; the text says what to change.",
    401: "There is no token, or it is not good: log in again.",
    403: "The role does not allow this.",
    404: "Not there, or of another organisation.",
    405: "The path exists, but not with this method; `allow` lists those it has.",
    408: "The body did not arrive in time.",
    409: "The request would be right in another state.",
    413: "The body is larger than the gateway takes.",
    429: "Too many: try again after `retry-after` seconds.",
    431: "The head is larger, or has more fields, than the gateway takes.",
    500: "A fault of the gateway, or of a service that could not be reached.",
    501: "The gateway does not do that.",
    503: "Not now.",
}
_NO_BASE = "Models of NVIDIA's to begin with: none"
_OF_EVERY = (400, 401, 403, 404, 429, 431, 500, 503)
_OPEN = (400, 431, 500, 503)


def jobs_table() -> Table:
    """By (method, path)."""
    experiment = f"{_V1}/experiments/{{experiment}}"
    return {
        **_open_table(),
        **_workspaces(f"{_V1}/workspaces"),
        **_workspaces(f"{_V2}/workspaces", "201"),
        ("GET", f"{_V1}/experiments"): _one(EXPERIMENTS, "All experiments", _listed("experiments", "Experiment"), _PAGE),
        ("POST", f"{_V1}/experiments"): _made(EXPERIMENTS, "A new experiment", "ExperimentRequest", ref("Experiment")),
        ("GET", experiment): _one(EXPERIMENTS, "One experiment", ref("Experiment")),
        ("PUT", experiment): _made(EXPERIMENTS, "Change an experiment", "ExperimentChange", ref("Experiment")),
        ("PATCH", experiment): _made(EXPERIMENTS, "Change an experiment", "ExperimentChange", ref("Experiment")),
        ("GET", f"{_V1}/experiments:base"): _one(EXPERIMENTS, _NO_BASE, _listed("experiments", "Experiment"), _PAGE),
        ("GET", f"{_V2}/jobs:list_base_experiments"): _one(
            EXPERIMENTS, _NO_BASE, _listed("experiments", "Experiment"), _PAGE
        ),
        ("DELETE", experiment): _one(EXPERIMENTS, "Remove an experiment and its jobs", ref("Experiment"), more=(409,)),
        **_jobs(f"{experiment}/jobs", "200", {**_ID, "description": "The id of the job, as a bare JSON string."}),
        **_jobs(f"{_V2}/jobs", "201", ref("Job")),
        **_services(experiment),
        ("GET", f"{_V2}/session"): _one(ACCESS, "Whose token this is, and what they may do", ref("Session")),
        ("GET", f"{_V2}/audit"): _one(ACCESS, "What was done in an organisation, the newest first", ref("Audit"), _PAGE[1:]),
    }  # fmt: skip


def job_schemas() -> dict[str, Schema]:
    """`components.schemas`."""
    stamps = {"id": _ID, "user_id": _TEXT, "created_on": _TIME, "last_modified": _TIME}
    pages = {name: {"type": "integer"} for name in ("total_records", "total_pages", "page_size", "page_index")}
    return {
        "Error": _object({"error_desc": _TEXT, "error_code": {"type": "integer"}}, "error_desc", "error_code"),
        "Pages": _object(pages),
        "LoginRequest": _object(
            {"ngc_key": _TEXT, "ngc_org_name": _TEXT, "enable_telemetry": {"type": ["boolean", "null"]}},
            "ngc_key",
            "ngc_org_name",
        ),
        "Login": _object({"user_id": _ID, "token": _TEXT, "user_name": _TEXT, "user_email": _TEXT}, "token"),
        "Session": _object(
            {
                "user_id": _TEXT,
                "user_name": _TEXT,
                "user_email": _TEXT,
                "organisation": _TEXT,
                "role": {"enum": ["viewer", "operator", "admin"]},
                "may": {"type": "array", "items": _TEXT},
            },
            "user_id",
            "organisation",
            "role",
            "may",
        ),
        "Audit": _object({"events": {"type": "array", "items": _THING}}, "events"),
        "WorkspaceRequest": _object(
            {
                "name": _NULLABLE,
                "cloud_type": {"enum": ["aws", "azure", "seaweedfs", "huggingface", "self_hosted"]},
                "cloud_specific_details": {
                    **_THING,
                    "description": "access_key, secret_key, cloud_region, endpoint_url, cloud_bucket_name (aws, seaweedfs); "
                    "account_name, access_key, cloud_bucket_name (azure); token (huggingface). Never given back.",
                },
                "shared": {"type": ["boolean", "null"]},
                "version": _NULLABLE,
                "force_create": {"type": ["boolean", "null"], "description": "Make another although the same is there."},
            }
        ),
        "WorkspaceIds": _object({"workspace_ids": {"type": "array", "items": _ID, "minItems": 1}}, "workspace_ids"),
        "BackupRequest": _object(
            {
                "workspace_metadata": {
                    "type": ["object", "null"],
                    "description": "cloud_type and cloud_specific_details of a bucket, unless the path names a workspace.",
                },
                "backup_file_name": {**_NULLABLE, "description": "To restore, as it was answered by :backup."},
            }
        ),
        "Workspace": _object({**stamps, "name": _TEXT, "shared": _FLAG, "version": _TEXT, "cloud_type": _TEXT}, "id"),
        "ExperimentRequest": _object(
            {"network_arch": _TEXT, "name": _NULLABLE, "description": _NULLABLE, "workspace": _MAYBE_ID}, "network_arch"
        ),
        "ExperimentChange": _object({"name": _NULLABLE, "description": _NULLABLE, "workspace": _MAYBE_ID}),
        "Experiment": _object({**stamps, "name": _TEXT, "network_arch": _TEXT, "workspace": _MAYBE_ID}, "id"),
        "JobRequest": _object(
            {
                "action": {**_TEXT, "description": "`train` registers a trained model; `inference` runs one once."},
                "checkpoint": {**_NULLABLE, "description": "Where the trained model lies; else results/ID in the bucket."},
                "parent_job_id": _MAYBE_ID,
                "specs": {"type": ["object", "null"]},
                "name": _NULLABLE,
                "description": _NULLABLE,
                "num_gpu": {"type": ["integer", "null"], "minimum": -1, "maximum": 1024},
            },
            "action",
        ),
        "Job": _object(
            {
                **stamps,
                "parent_id": _MAYBE_ID,
                "experiment_id": _ID,
                "action": _TEXT,
                "status": {"enum": ["Done", "Started", "Running", "Error", "Pending", "Canceled", "Canceling", "Pausing",
                                    "Paused", "Resuming"]},
                "specs": _THING,
                "job_details": _THING,
            },
            "id",
            "status",
        ),
        "StartRequest": _object(
            {
                "parent_id": {**_MAYBE_ID, "description": "The completed training job; `parent_job_id` is the same."},
                "parent_job_id": _MAYBE_ID,
                "model_path": _NULLABLE,
                "hf_model": _NULLABLE,
                "network_arch": _NULLABLE,
                "workspace": {**_MAYBE_ID, "description": "Whose keys are used; the experiment's else."},
                "docker_env_vars": {"type": ["object", "null"]},
            }
        ),
        "Started": _object({"job_id": _ID, "status": _TEXT, "message": _TEXT}, "job_id", "status", "message"),
        "Stopped": _object({"job_id": _ID, "status": _TEXT, "message": _TEXT}, "job_id", "status", "message"),
        "ServiceStatus": _object(
            {
                "job_id": _ID,
                "model_loaded": _FLAG,
                "model_loading": _FLAG,
                "server_initializing": _FLAG,
                "initialization_error": _NULLABLE,
                "model_load_error": _NULLABLE,
                "status": _TEXT,
                "pod_name": _NULLABLE,
                "pod_status": _NULLABLE,
            },
            "job_id",
            "model_loaded",
        ),
        "State": _object({"job_id": _ID, "status": _TEXT, "message": _TEXT, "error": _TEXT}, "status"),
    }  # fmt: skip


_PAGE = (
    query("skip", "How many to leave out.", {"type": "integer", "minimum": 0}),
    query("size", "How many at most.", {"type": "integer", "minimum": 0}),
)


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    return made


def _listed(name: str, schema: str) -> Schema:
    return _object({name: {"type": "array", "items": ref(schema)}, "pagination_info": ref("Pages")}, name)


def _one(
    tag: str, summary: str, schema: Schema, parameters: tuple[Schema, ...] = (), more: tuple[int, ...] = ()
) -> Operation:
    return _operation(tag, summary, {"200": answer("As asked.", json_of(schema))}, parameters=parameters, more=more)


def _made(tag: str, summary: str, request: str, schema: Schema, status: str = "200", *more: int) -> Operation:
    return _operation(tag, summary, {status: answer("Done.", json_of(schema))}, json_of(ref(request)), more=more)


def _operation(
    tag: str,
    summary: str,
    answers: dict[str, Schema],
    body: dict[str, Any] | None = None,
    *,
    parameters: tuple[Schema, ...] = (),
    more: tuple[int, ...] = (),
    is_open: bool = False,
) -> Operation:
    statuses = {*(_OPEN if is_open else _OF_EVERY), *more, *((408, 413) if body else ())}
    failing = {str(each): answer(_ERRORS[each], json_of(ref("Error"))) for each in sorted(statuses)}
    made: Operation = {"tags": [tag], "summary": summary, "responses": {**failing, **answers}}
    if parameters:
        made["parameters"] = list(parameters)
    if body:
        made["requestBody"] = {"required": True, "content": body}
    made["security"] = [] if is_open else [{"bearer": []}]
    return made


def _open_table() -> dict[tuple[str, str], Operation]:
    made: dict[tuple[str, str], Operation] = {}
    for base in ("/api/v1", "/api/v2"):
        login = {"200": answer("The token, good for 24 hours.", json_of(ref("Login")))}
        made["POST", f"{base}/login"] = _operation(
            ACCESS,
            "A key and an organisation to a token",
            login,
            json_of(ref("LoginRequest")),
            is_open=True,
            more=(401, 429),
        )
        made["POST", f"{base}/logout"] = _one(ACCESS, "Refuse this token from now on", _THING)
    for base in ("", "/api/v1", "/api/v2"):
        for path, text in (
            ("health", "It lives"),
            ("health/liveness", "It lives"),
            ("health/readiness", "It takes work"),
            ("version", "Which Headrace this is"),
        ):
            told = {"200": answer("It is.", json_of(_THING))}
            made["GET", f"{base}/{path}"] = _operation(HEALTH, text, told, is_open=True)
    for path, kind in (("/openapi.json", JSON), ("/docs", "text/html"), ("/metrics", TEXT)):
        told = {"200": answer("Here it is.", {kind: {}}), "304": answer("As before.")}
        made["GET", path] = _operation(
            ABOUT_ITSELF, "What you are reading, for people, for programs", told, is_open=True
        )
    return made  # fmt: skip


def _workspaces(path: str, made: str = "200") -> dict[tuple[str, str], Operation]:
    one, schema = f"{path}/{{workspace}}", ref("Workspace")
    table = {
        ("GET", path): _one(WORKSPACES, "All workspaces", _listed("workspaces", "Workspace"), _PAGE),
        ("POST", path): _made(WORKSPACES, "A new workspace", "WorkspaceRequest", schema, made),
        ("GET", one): _one(WORKSPACES, "One workspace", schema),
        ("PUT", one): _made(WORKSPACES, "Change a workspace", "WorkspaceRequest", schema, "200", 409),
        ("PATCH", one): _made(WORKSPACES, "Change a workspace", "WorkspaceRequest", schema, "200", 409),
        ("DELETE", one): _one(WORKSPACES, "Remove a workspace", schema, more=(409,)),
        ("DELETE", path): _made(WORKSPACES, "Remove several, or none", "WorkspaceIds", _THING, "200", 409),
    }
    texts = {"backup": "All that the organisation has, into a bucket", "restore": "Put back what is missing"}
    for verb, text in texts.items():
        for where in (f"{path}:", f"{one}:", f"{one}/"):
            table["POST", f"{where}{verb}"] = _made(WORKSPACES, text, "BackupRequest", _THING, "200", 409)
    table["POST", path]["responses"]["200"] = answer("The one that is the same.", json_of(schema))
    return table


def _jobs(path: str, made: str, schema: Schema) -> dict[tuple[str, str], Operation]:
    one = f"{path}/{{job}}"
    tail = (query("tail", "How many lines.", {"type": "integer", "minimum": 0}),)
    log = _operation(JOBS, "The last lines of its log", {"200": answer("Text.", {TEXT: {}})}, parameters=tail)
    return {
        ("GET", path): _one(JOBS, "All jobs, the newest first", _listed("jobs", "Job"), _PAGE),
        ("POST", path): _made(JOBS, "Register a trained model, or run one once", "JobRequest", schema, made, 409, 501),
        ("GET", one): _one(JOBS, "One job", ref("Job")),
        ("DELETE", one): _one(JOBS, "Remove a job", ref("Job"), more=(409,)),
        ("POST", f"{one}:cancel"): _one(JOBS, "End a job", ref("Job"), more=(409,)),
        ("POST", f"{one}:pause"): _one(JOBS, "Have a batch wait until it is resumed", ref("Job"), more=(409,)),
        ("POST", f"{one}:resume"): _one(JOBS, "Have a paused batch go on", ref("Job"), more=(409,)),
        ("POST", f"{one}:retry"): _retried(made),
        ("GET", f"{one}/logs"): log,
        ("GET", f"{one}:logs"): log,
        ("GET", f"{one}:events"): _one(JOBS, "Every change of a job, with its reason", _THING),
    }


def _retried(made: str) -> Operation:
    told = {made: answer("The id of the new job, as a bare JSON string.", json_of(_ID))}
    return _operation(JOBS, "A new batch like one that failed", told, more=(409,))


def _services(experiment: str) -> dict[tuple[str, str], Operation]:
    v1, v2 = f"{experiment}/jobs/{{job}}/inference_microservice", f"{_V2}/inference_microservices/{{job}}"
    state = json_of(ref("State"))
    inference = {
        "200": answer("What the model says.", json_of(_THING)),
        "202": answer("The server is initializing, or its model is loading: try again.", state),
        "503": answer("Initializing or loading failed, or has not begun.", state),
    }
    free = json_of({"type": "object", "description": "As the model wants it: media, text, prompt, images, ..."})
    stopped = _one(SERVICES, "Stop a service for good", ref("Stopped"))
    return {
        ("POST", f"{experiment}/inference_microservice/start"):
            _made(SERVICES, "Start a service of a trained model", "StartRequest", ref("Started"), "200", 409),
        ("POST", f"{v1}/inference"): _operation(SERVICES, "Ask the model", inference, free, more=(409,)),
        ("GET", f"{v1}/status"): _one(SERVICES, "How a service is", ref("ServiceStatus")),
        ("POST", f"{v1}/stop"): stopped,
        ("POST", f"{experiment}/jobs/{{job}}:status_update"):
            _operation(SERVICES, "A service's own report", {"200": answer("Taken.", json_of(_THING))}, json_of(_THING)),
        ("POST", f"{_V2}/inference_microservices:start"):
            _made(SERVICES, "Start a service", "StartRequest", ref("Started"), "201", 409),
        ("POST", f"{v2}:inference"):
            _operation(SERVICES, "Ask the model", {"200": answer("What it says.", json_of(_THING))}, free),
        ("GET", f"{v2}:status"): _one(SERVICES, "How a service is", ref("ServiceStatus")),
        ("DELETE", f"{v2}:stop"): stopped,
        ("POST", f"{v2}:stop"): stopped,
    }  # fmt: skip
