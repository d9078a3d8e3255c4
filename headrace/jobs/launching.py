# SPDX-License-Identifier: Apache-2.0
"""A job and its plan as a `LaunchSpec`: the command line of `headrace microservice`. Called by `services`.

Whatever users gave, credentials above all, is among the secret words: a command line has ids, numbers and our own folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.jobs.planning import Plan
from headrace.jobs.records import Job
from headrace.jobs.settings import JobSettings
from headrace.launch.contract import PORT, SECRET, LaunchSpec


def launch_spec(job: Job, plan: Plan, settings: JobSettings, callback_url: str, callback_key: str) -> LaunchSpec:
    """What a driver starts."""
    minutes = settings.idle_timeout_minutes if plan.idle_timeout_minutes is None else plan.idle_timeout_minutes
    idle = ("--idle-timeout-minutes", f"{minutes:g}") if minutes else ("--disable_auto_deletion",)
    words = (
        *settings.service_words,
        "--job",
        SECRET % "job",
        "--docker_env_vars",
        SECRET % "docker_env_vars",
        "--job-id",
        job.id,
        "--host",
        settings.service_host,
        "--port",
        PORT,
        "--models-dir",
        str(settings.models_folder.absolute()),
        "--grace-seconds",
        f"{settings.grace_seconds:g}",
        *idle,
    )
    variables = _variables(job, plan, callback_url, callback_key)
    return LaunchSpec(
        job.id,
        settings.service_target,
        words,
        secrets={"job": json.dumps(_job(job, plan)), "docker_env_vars": json.dumps(variables)},
        gpus=plan.num_gpu,
        labels={"org": job.org, "experiment": job.experiment_id, "job": job.id},
    )


def _job(job: Job, plan: Plan) -> Mapping[str, Any]:
    specs: dict[str, Any] = {**plan.specs, "model_path": plan.model_path}
    if plan.workspace is not None and plan.workspace.bucket:
        specs["results_dir"] = f"{plan.workspace.cloud_type}://{plan.workspace.bucket}/results/{job.id}"
    made: dict[str, Any] = {"job_id": job.id, "specs": specs, "neural_network_name": plan.network_arch}
    if plan.metadata:
        made["cloud_metadata"] = plan.metadata
    return made


def _variables(job: Job, plan: Plan, callback_url: str, callback_key: str) -> dict[str, str]:
    made = {
        **plan.variables,
        "TAO_EXECUTION_BACKEND": "local-process",
        "TAO_API_JOB_ID": job.id,
        "CLOUD_BASED": "True" if plan.metadata else "False",
    }
    if callback_url:
        path = f"/api/v1/orgs/{job.org}/experiments/{job.experiment_id}/jobs/{job.id}"
        made["TAO_LOGGING_SERVER_URL"] = callback_url.rstrip("/") + path
        made["TAO_ADMIN_KEY"] = callback_key
    return made
