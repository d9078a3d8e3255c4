# SPDX-License-Identifier: Apache-2.0
"""Table of BenchmarkJob: a load test of a service, and where its results go."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Kind,
    any_value,
    choice,
    integer,
    list_of,
    mapping,
    record,
    reference,
    rename_field,
    string,
)
from headrace.fleet.schema.kinds.components import ENV, MOUNTS, POD_FIELDS, RESOURCES
from headrace.fleet.schema.kinds.models import STORAGE

_POD_FIELDS = ("nodeSelector", "tolerations", "affinity", "volumes")

_SPEC = record(
    "spec",
    "Definition of the benchmark.",
    record(
        "endpoint",
        "The service or the URL to test: one of them.",
        record(
            "inferenceService",
            "",
            reference("name", "", required=True),
            string("namespace"),
        ),
        record(
            "endpoint",
            "",
            string("url", pattern=r"https?://.+", example="http://host:8080", required=True),
            choice("apiFormat", "", "openai", "oci-cohere", "cohere"),
            string("modelName"),
        ),
        required=True,
    ),
    choice(
        "task",
        "Task of the requests.",
        "text-to-text",
        "image-to-text",
        "text-to-embeddings",
        "image-to-embeddings",
        required=True,
    ),
    list_of(
        "trafficScenarios",
        "Sizes of prompts and answers.",
        string("", pattern=r"[NDUEI]\([0-9, ]+\)(/\([0-9, ]+\))?", example="D(100,100)"),
    ),
    list_of("numConcurrency", "Numbers of concurrent requests, one run each.", integer("", minimum=1)),
    integer("maxTimePerIteration", "Minutes per run.", minimum=1, required=True),
    integer("maxRequestsPerIteration", "Requests per run.", minimum=1, required=True),
    mapping("additionalRequestParams", "Parameters of every request.", any_value("")),
    rename_field(STORAGE, "dataset", "Where prompts come from."),
    record("outputLocation", "Where results go.", *STORAGE.fields, required=True),
    string("resultFolderName"),
    record(
        "serviceMetadata",
        "About the service, for the report.",
        string("engine"),
        string("version"),
        string("gpuType"),
        integer("gpuCount", minimum=0),
    ),
    record(
        "podOverride",
        "Overrides of the job's pod.",
        string("image"),
        ENV,
        list_of("envFrom", "", record("", "")),
        MOUNTS,
        RESOURCES,
        *(row for row in POD_FIELDS if row.name in _POD_FIELDS),
    ),
    record("huggingFaceSecretReference", "", string("name", "", required=True)),
)

BENCHMARK_JOB = Kind(
    "BenchmarkJob",
    "benchmarkjobs",
    True,
    "A load test of a service, and its result.",
    _SPEC,
    record(
        "status",
        "State of the benchmark.",
        choice("state", "", "Pending", "Running", "Completed", "Failed"),
        string("startTime"),
        string("completionTime"),
        string("lastReconcileTime"),
        string("failureMessage"),
        string("details"),
        integer("observedGeneration", minimum=0, maximum=INT64),
    ),
    columns=(Column("Age", ".metadata.creationTimestamp", "date"), Column("Status", ".status.state")),
)
