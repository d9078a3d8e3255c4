# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of the gateway: `GET /openapi.json` and `GET /docs`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import orjson

from headrace.api.openapi.http import load_page
from headrace.api.openapi.operations import (
    JSON,
    TEXT,
    Operation,
    OperationTable,
    Schema,
    json_content,
    query,
    ref,
    response_object,
)
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.heads import JSON as JSON_BYTES

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

_FIELDS = [(b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")]
_OK = ResponseHead(200, [(CONTENT_TYPE, JSON_BYTES), *_FIELDS])
_NOT_MODIFIED = ResponseHead(304, _FIELDS)

ACCESS, WORKSPACES, EXPERIMENTS, JOBS = "Access", "Workspaces", "Experiments", "Jobs"
SERVICES, HEALTH, ABOUT_TAG = "Inference microservices", "Health", "About"
ABOUT = (
    "Headrace's gateway: models as inference microservices behind a job API with login. Log in with a key and an "
    "organisation, send the token as `Authorization: Bearer TOKEN`. Errors are JSON, "
    '`{"error_desc": text, "error_code": number}`. Bodies are parsed as JSON whatever their Content-Type. Every GET path '
    "also accepts HEAD. `/api/v2` has the routes that NVIDIA's newest client uses."
)
_V1, _V2 = "/api/v1/orgs/{org}", "/api/v2/orgs/{org}"
_STRING: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_ID: Schema = {"type": "string", "format": "uuid"}
_NULLABLE_ID: Schema = {"type": ["string", "null"], "format": "uuid"}
_TIME: Schema = {"type": "string", "format": "date-time"}
PATH_SCHEMAS: dict[str, Schema] = {
    "org": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,255}$"},
    "workspace": _ID,
    "experiment": _ID,
    "job": _ID,
}
"""Schemas of path parameters."""
_ERRORS = {
    400: "The request is invalid; the message says what to change.",
    401: "The token is missing or invalid: log in again.",
    403: "The role does not allow this.",
    404: "Not found, or in another organisation.",
    405: "The path does not accept this method; `allow` lists the methods.",
    408: "The body did not arrive in time.",
    409: "The current state does not allow the request.",
    413: "The body is too large.",
    429: "Too many requests: try again after `retry-after` seconds.",
    431: "The head is too large or has too many fields.",
    500: "Internal error of the gateway, or an unreachable service.",
    501: "Not implemented.",
    503: "Unavailable.",
}
_BASE_EXPERIMENTS = "List NVIDIA's base experiments: none"
_COMMON_ERRORS = (400, 401, 403, 404, 429, 431, 500, 503)
_PUBLIC_ERRORS = (400, 431, 500, 503)
_PAGE = (
    query("skip", "Number of entries to skip.", {"type": "integer", "minimum": 0}),
    query("size", "Maximum number of entries.", {"type": "integer", "minimum": 0}),
)


class OpenApiRoutes:
    """The routes; `described` has every route of the gateway, including those of the fallback."""

    def __init__(self, described: Routes) -> None:
        self._routes = described
        self._text = b""
        self._tag = b""
        self._page_head, self._page = load_page()

    def add_to(self, routes: Routes) -> None:
        """Add the routes."""
        for table in (routes, self._routes):
            table.add("GET", "/openapi.json", self.document)
            table.add("GET", "/docs", self.page)

    def page(self, exchange: Exchange) -> None:
        """Send the HTML page."""
        exchange.respond(self._page_head, self._page)

    def document(self, exchange: Exchange) -> None:
        """Send the OpenAPI document, which is built once."""
        if not self._text:
            self._text = openapi_document(self._routes)
            self._tag = f'W/"{hashlib.sha256(self._text).hexdigest()[:32]}"'.encode()
        extra = ((b"etag", self._tag),)
        if self._tag in (exchange.head.get(b"if-none-match") or b""):
            exchange.respond(_NOT_MODIFIED, b"", extra)
        else:
            exchange.respond(_OK, self._text, extra)


def openapi_document(routes: Routes) -> bytes:
    """Build the OpenAPI document."""
    # Imported late: they import half of the inference server, for a document that is rarely requested.
    from headrace.api.openapi.document import base_document
    from headrace.api.openapi.models import TAG as MODELS

    base = base_document(routes, [jobs_table()], "Headrace gateway")
    base["info"]["description"] = ABOUT
    base["tags"] = [tag for tag in base["tags"] if tag["name"] != MODELS]
    base["components"] = {
        "schemas": job_schemas(),
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    }
    for item in base["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = PATH_SCHEMAS.get(parameter["name"], parameter["schema"])
    base["x-headrace-models"] = {"shown": 0, "loaded": 0}
    return orjson.dumps(base)


def jobs_table() -> OperationTable:
    """Return the operations by (method, path)."""
    experiment = f"{_V1}/experiments/{{experiment}}"
    return {
        **_public_operations(),
        **_workspaces(f"{_V1}/workspaces"),
        **_workspaces(f"{_V2}/workspaces", "201"),
        ("GET", f"{_V1}/experiments"): _get(EXPERIMENTS, "List experiments", _list("experiments", "Experiment"), _PAGE),
        ("POST", f"{_V1}/experiments"): _post(
            EXPERIMENTS, "Create an experiment", "ExperimentRequest", ref("Experiment")
        ),
        ("GET", experiment): _get(EXPERIMENTS, "Get an experiment", ref("Experiment")),
        ("PUT", experiment): _post(EXPERIMENTS, "Change an experiment", "ExperimentChange", ref("Experiment")),
        ("PATCH", experiment): _post(EXPERIMENTS, "Change an experiment", "ExperimentChange", ref("Experiment")),
        ("GET", f"{_V1}/experiments:base"): _get(
            EXPERIMENTS, _BASE_EXPERIMENTS, _list("experiments", "Experiment"), _PAGE
        ),
        ("GET", f"{_V2}/jobs:list_base_experiments"): _get(
            EXPERIMENTS, _BASE_EXPERIMENTS, _list("experiments", "Experiment"), _PAGE
        ),
        ("DELETE", experiment): _get(EXPERIMENTS, "Delete an experiment and its jobs", ref("Experiment"), more=(409,)),
        **_jobs(f"{experiment}/jobs", "200", {**_ID, "description": "The id of the job, as a bare JSON string."}),
        **_jobs(f"{_V2}/jobs", "201", ref("Job")),
        **_services(experiment),
        ("GET", f"{_V2}/session"): _get(ACCESS, "User of the token, and allowed operations", ref("Session")),
        ("GET", f"{_V2}/audit"): _get(ACCESS, "Audit log of an organisation, newest first", ref("Audit"), _PAGE[1:]),
    }


def job_schemas() -> dict[str, Schema]:
    """Return the schemas of the OpenAPI document."""
    stamps = {"id": _ID, "user_id": _STRING, "created_on": _TIME, "last_modified": _TIME}
    pages = {name: {"type": "integer"} for name in ("total_records", "total_pages", "page_size", "page_index")}
    return {
        "Error": _object({"error_desc": _STRING, "error_code": {"type": "integer"}}, "error_desc", "error_code"),
        "Pages": _object(pages),
        "LoginRequest": _object(
            {"ngc_key": _STRING, "ngc_org_name": _STRING, "enable_telemetry": {"type": ["boolean", "null"]}},
            "ngc_key",
            "ngc_org_name",
        ),
        "Login": _object({"user_id": _ID, "token": _STRING, "user_name": _STRING, "user_email": _STRING}, "token"),
        "Session": _object(
            {
                "user_id": _STRING,
                "user_name": _STRING,
                "user_email": _STRING,
                "organisation": _STRING,
                "role": {"enum": ["viewer", "operator", "admin"]},
                "may": {"type": "array", "items": _STRING},
            },
            "user_id",
            "organisation",
            "role",
            "may",
        ),
        "Audit": _object({"events": {"type": "array", "items": _OBJECT}}, "events"),
        "WorkspaceRequest": _object(
            {
                "name": _NULLABLE,
                "cloud_type": {"enum": ["aws", "azure", "seaweedfs", "huggingface", "self_hosted"]},
                "cloud_specific_details": {
                    **_OBJECT,
                    "description": "access_key, secret_key, cloud_region, endpoint_url, cloud_bucket_name (aws, seaweedfs); "
                    "account_name, access_key, cloud_bucket_name (azure); token (huggingface). Never returned.",
                },
                "shared": {"type": ["boolean", "null"]},
                "version": _NULLABLE,
                "force_create": {
                    "type": ["boolean", "null"],
                    "description": "Create a new workspace even if an equal one exists.",
                },
            }
        ),
        "WorkspaceIds": _object({"workspace_ids": {"type": "array", "items": _ID, "minItems": 1}}, "workspace_ids"),
        "BackupRequest": _object(
            {
                "workspace_metadata": {
                    "type": ["object", "null"],
                    "description": "cloud_type and cloud_specific_details of a bucket, unless the path names a workspace.",
                },
                "backup_file_name": {
                    **_NULLABLE,
                    "description": "Name of the backup to restore, as returned by :backup.",
                },
            }
        ),
        "Workspace": _object(
            {**stamps, "name": _STRING, "shared": _BOOLEAN, "version": _STRING, "cloud_type": _STRING}, "id"
        ),
        "ExperimentRequest": _object(
            {"network_arch": _STRING, "name": _NULLABLE, "description": _NULLABLE, "workspace": _NULLABLE_ID},
            "network_arch",
        ),
        "ExperimentChange": _object({"name": _NULLABLE, "description": _NULLABLE, "workspace": _NULLABLE_ID}),
        "Experiment": _object({**stamps, "name": _STRING, "network_arch": _STRING, "workspace": _NULLABLE_ID}, "id"),
        "JobRequest": _object(
            {
                "action": {
                    **_STRING,
                    "description": "`train` registers a trained model; `inference` creates a batch job.",
                },
                "checkpoint": {
                    **_NULLABLE,
                    "description": "Location of the trained model; default: results/ID in the bucket.",
                },
                "parent_job_id": _NULLABLE_ID,
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
                "parent_id": _NULLABLE_ID,
                "experiment_id": _ID,
                "action": _STRING,
                "status": {
                    "enum": [
                        "Done",
                        "Started",
                        "Running",
                        "Error",
                        "Pending",
                        "Canceled",
                        "Canceling",
                        "Pausing",
                        "Paused",
                        "Resuming",
                    ]
                },
                "specs": _OBJECT,
                "job_details": _OBJECT,
            },
            "id",
            "status",
        ),
        "StartRequest": _object(
            {
                "parent_id": {**_NULLABLE_ID, "description": "The completed training job; alias: `parent_job_id`."},
                "parent_job_id": _NULLABLE_ID,
                "model_path": _NULLABLE,
                "hf_model": _NULLABLE,
                "network_arch": _NULLABLE,
                "workspace": {
                    **_NULLABLE_ID,
                    "description": "Workspace with the credentials; default: the experiment's.",
                },
                "docker_env_vars": {"type": ["object", "null"]},
            }
        ),
        "Started": _object({"job_id": _ID, "status": _STRING, "message": _STRING}, "job_id", "status", "message"),
        "Stopped": _object({"job_id": _ID, "status": _STRING, "message": _STRING}, "job_id", "status", "message"),
        "ServiceStatus": _object(
            {
                "job_id": _ID,
                "model_loaded": _BOOLEAN,
                "model_loading": _BOOLEAN,
                "server_initializing": _BOOLEAN,
                "initialization_error": _NULLABLE,
                "model_load_error": _NULLABLE,
                "status": _STRING,
                "pod_name": _NULLABLE,
                "pod_status": _NULLABLE,
            },
            "job_id",
            "model_loaded",
        ),
        "State": _object({"job_id": _ID, "status": _STRING, "message": _STRING, "error": _STRING}, "status"),
    }


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _list(name: str, schema: str) -> Schema:
    return _object({name: {"type": "array", "items": ref(schema)}, "pagination_info": ref("Pages")}, name)


def _get(
    tag: str, summary: str, schema: Schema, parameters: tuple[Schema, ...] = (), more: tuple[int, ...] = ()
) -> Operation:
    return _operation(
        tag, summary, {"200": response_object("Success.", json_content(schema))}, parameters=parameters, more=more
    )


def _post(tag: str, summary: str, request: str, schema: Schema, status: str = "200", *more: int) -> Operation:
    return _operation(
        tag, summary, {status: response_object("Success.", json_content(schema))}, json_content(ref(request)), more=more
    )


def _operation(
    tag: str,
    summary: str,
    responses: dict[str, Schema],
    body: dict[str, Any] | None = None,
    *,
    parameters: tuple[Schema, ...] = (),
    more: tuple[int, ...] = (),
    is_public: bool = False,
) -> Operation:
    statuses = {*(_PUBLIC_ERRORS if is_public else _COMMON_ERRORS), *more, *((408, 413) if body else ())}
    error_responses = {
        str(status): response_object(_ERRORS[status], json_content(ref("Error"))) for status in sorted(statuses)
    }
    operation: Operation = {"tags": [tag], "summary": summary, "responses": {**error_responses, **responses}}
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        operation["requestBody"] = {"required": True, "content": body}
    operation["security"] = [] if is_public else [{"bearer": []}]
    return operation


def _public_operations() -> dict[tuple[str, str], Operation]:
    operations: dict[tuple[str, str], Operation] = {}
    for base in ("/api/v1", "/api/v2"):
        login = {"200": response_object("The token, valid for 24 hours.", json_content(ref("Login")))}
        operations["POST", f"{base}/login"] = _operation(
            ACCESS,
            "Exchange a key and an organisation for a token",
            login,
            json_content(ref("LoginRequest")),
            is_public=True,
            more=(401, 429),
        )
        operations["POST", f"{base}/logout"] = _get(ACCESS, "Revoke the token", _OBJECT)
    for base in ("", "/api/v1", "/api/v2"):
        for path, text in (
            ("health", "Liveness"),
            ("health/liveness", "Liveness"),
            ("health/readiness", "Readiness"),
            ("version", "Version of Headrace"),
        ):
            responses = {"200": response_object("Success.", json_content(_OBJECT))}
            operations["GET", f"{base}/{path}"] = _operation(HEALTH, text, responses, is_public=True)
    for path, kind in (("/openapi.json", JSON), ("/docs", "text/html"), ("/metrics", TEXT)):
        responses = {"200": response_object("Success.", {kind: {}}), "304": response_object("Not modified.")}
        operations["GET", path] = _operation(ABOUT_TAG, "API document, API page and metrics", responses, is_public=True)
    return operations


def _workspaces(path: str, created_status: str = "200") -> dict[tuple[str, str], Operation]:
    workspace_path, schema = f"{path}/{{workspace}}", ref("Workspace")
    table = {
        ("GET", path): _get(WORKSPACES, "List workspaces", _list("workspaces", "Workspace"), _PAGE),
        ("POST", path): _post(WORKSPACES, "Create a workspace", "WorkspaceRequest", schema, created_status),
        ("GET", workspace_path): _get(WORKSPACES, "Get a workspace", schema),
        ("PUT", workspace_path): _post(WORKSPACES, "Change a workspace", "WorkspaceRequest", schema, "200", 409),
        ("PATCH", workspace_path): _post(WORKSPACES, "Change a workspace", "WorkspaceRequest", schema, "200", 409),
        ("DELETE", workspace_path): _get(WORKSPACES, "Delete a workspace", schema, more=(409,)),
        ("DELETE", path): _post(WORKSPACES, "Delete several workspaces, or none", "WorkspaceIds", _OBJECT, "200", 409),
    }
    texts = {"backup": "Back up the organisation to a bucket", "restore": "Restore missing records from a backup"}
    for verb, text in texts.items():
        for where in (f"{path}:", f"{workspace_path}:", f"{workspace_path}/"):
            table["POST", f"{where}{verb}"] = _post(WORKSPACES, text, "BackupRequest", _OBJECT, "200", 409)
    table["POST", path]["responses"]["200"] = response_object(
        "The existing workspace with the same configuration.", json_content(schema)
    )
    return table


def _jobs(path: str, created_status: str, schema: Schema) -> dict[tuple[str, str], Operation]:
    job_path = f"{path}/{{job}}"
    tail = (query("tail", "Number of lines.", {"type": "integer", "minimum": 0}),)
    log = _operation(JOBS, "Last lines of a job's log", {"200": response_object("Text.", {TEXT: {}})}, parameters=tail)
    return {
        ("GET", path): _get(JOBS, "List jobs, newest first", _list("jobs", "Job"), _PAGE),
        ("POST", path): _post(
            JOBS, "Register a trained model, or create a batch job", "JobRequest", schema, created_status, 409, 501
        ),
        ("GET", job_path): _get(JOBS, "Get a job", ref("Job")),
        ("DELETE", job_path): _get(JOBS, "Delete a job", ref("Job"), more=(409,)),
        ("POST", f"{job_path}:cancel"): _get(JOBS, "Cancel a job", ref("Job"), more=(409,)),
        ("POST", f"{job_path}:pause"): _get(JOBS, "Pause a batch job", ref("Job"), more=(409,)),
        ("POST", f"{job_path}:resume"): _get(JOBS, "Resume a paused batch job", ref("Job"), more=(409,)),
        ("POST", f"{job_path}:retry"): _retry(created_status),
        ("GET", f"{job_path}/logs"): log,
        ("GET", f"{job_path}:logs"): log,
        ("GET", f"{job_path}:events"): _get(JOBS, "Events of a job, with reasons", _OBJECT),
    }


def _retry(created_status: str) -> Operation:
    responses = {created_status: response_object("The id of the new job, as a bare JSON string.", json_content(_ID))}
    return _operation(JOBS, "Retry a failed batch job as a new job", responses, more=(409,))


def _services(experiment: str) -> dict[tuple[str, str], Operation]:
    v1, v2 = f"{experiment}/jobs/{{job}}/inference_microservice", f"{_V2}/inference_microservices/{{job}}"
    state = json_content(ref("State"))
    inference = {
        "200": response_object("The model's response.", json_content(_OBJECT)),
        "202": response_object("The server is initializing, or its model is loading: try again.", state),
        "503": response_object("Initialization or loading failed, or has not started.", state),
    }
    free = json_content({"type": "object", "description": "Depends on the model: media, text, prompt, images, ..."})
    stopped = _get(SERVICES, "Stop a service for good", ref("Stopped"))
    return {
        ("POST", f"{experiment}/inference_microservice/start"): _post(
            SERVICES, "Start a service for a trained model", "StartRequest", ref("Started"), "200", 409
        ),
        ("POST", f"{v1}/inference"): _operation(SERVICES, "Run inference", inference, free, more=(409,)),
        ("GET", f"{v1}/status"): _get(SERVICES, "Status of a service", ref("ServiceStatus")),
        ("POST", f"{v1}/stop"): stopped,
        ("POST", f"{experiment}/jobs/{{job}}:status_update"): _operation(
            SERVICES,
            "Status update from a service",
            {"200": response_object("Accepted.", json_content(_OBJECT))},
            json_content(_OBJECT),
        ),
        ("POST", f"{_V2}/inference_microservices:start"): _post(
            SERVICES, "Start a service", "StartRequest", ref("Started"), "201", 409
        ),
        ("POST", f"{v2}:inference"): _operation(
            SERVICES, "Run inference", {"200": response_object("The model's response.", json_content(_OBJECT))}, free
        ),
        ("GET", f"{v2}:status"): _get(SERVICES, "Status of a service", ref("ServiceStatus")),
        ("DELETE", f"{v2}:stop"): stopped,
        ("POST", f"{v2}:stop"): stopped,
    }
