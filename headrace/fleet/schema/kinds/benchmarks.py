# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJob: load on a service, once, and where its numbers go."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Kind,
    anything,
    choice,
    many,
    mapping,
    record,
    reference,
    renamed,
    text,
    whole,
)
from headrace.fleet.schema.kinds.models import STORAGE
from headrace.fleet.schema.kinds.pods import ENV, MOUNTS, POD, RESOURCES

_POD_FIELDS = ("nodeSelector", "tolerations", "affinity", "volumes")

_SPEC = record(
    "spec",
    "What is measured.",
    record(
        "endpoint",
        "The service or the address to ask: one of them.",
        record(
            "inferenceService",
            "",
            reference("name", "", required=True),
            text("namespace"),
        ),
        record(
            "endpoint",
            "",
            text("url", pattern=r"https?://.+", example="http://host:8080", required=True),
            choice("apiFormat", "", "openai", "oci-cohere", "cohere"),
            text("modelName"),
        ),
        required=True,
    ),
    choice(
        "task",
        "What is asked.",
        "text-to-text",
        "image-to-text",
        "text-to-embeddings",
        "image-to-embeddings",
        required=True,
    ),
    many(
        "trafficScenarios",
        "Sizes of prompts and answers.",
        text("", pattern=r"[NDUEI]\([0-9, ]+\)(/\([0-9, ]+\))?", example="D(100,100)"),
    ),
    many("numConcurrency", "Requests at a time, one run each.", whole("", least=1)),
    whole("maxTimePerIteration", "Minutes.", least=1, required=True),
    whole("maxRequestsPerIteration", "Requests.", least=1, required=True),
    mapping("additionalRequestParams", "For every request.", anything("")),
    renamed(STORAGE, "dataset", "Where prompts come from."),
    record("outputLocation", "Where results go.", *STORAGE.fields, required=True),
    text("resultFolderName"),
    record(
        "serviceMetadata",
        "About the service, for the report.",
        text("engine"),
        text("version"),
        text("gpuType"),
        whole("gpuCount", least=0),
    ),
    record(
        "podOverride",
        "For the job's pod.",
        text("image"),
        ENV,
        many("envFrom", "", record("", "")),
        MOUNTS,
        RESOURCES,
        *(row for row in POD if row.name in _POD_FIELDS),
    ),
    record("huggingFaceSecretReference", "", text("name", "", required=True)),
)

BENCHMARK_JOB = Kind(
    "BenchmarkJob",
    "benchmarkjobs",
    True,
    "Load on a service, and what came of it.",
    _SPEC,
    record(
        "status",
        "How far it is.",
        choice("state", "", "Pending", "Running", "Completed", "Failed"),
        text("startTime"),
        text("completionTime"),
        text("lastReconcileTime"),
        text("failureMessage"),
        text("details"),
        whole("observedGeneration", least=0, most=INT64),
    ),
    columns=(Column("Age", ".metadata.creationTimestamp", "date"), Column("Status", ".status.state")),
)
