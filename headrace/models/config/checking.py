# SPDX-License-Identifier: Apache-2.0
"""Whether a completed configuration can be served: the whole of it, and what belongs to no part in particular.

Called by `finishing`. Each part has a module of its own beside this one; all add to one `Report`. What a backend can
do, and whether it is there at all, is not known here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from headrace.core.names import is_name
from headrace.models.config.check_ensemble import check_ensemble
from headrace.models.config.check_groups import check_groups
from headrace.models.config.check_schedule import check_dynamic_batching
from headrace.models.config.check_sequence import check_sequence_batching
from headrace.models.config.check_tensors import check_batch_tensors, check_tensors
from headrace.models.config.check_warmup import check_warmups
from headrace.models.config.drafts import Draft
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.reports import Report

_PART_BYTES = 255
"""How long a file's name may be."""


def check_config(message: Any, draft: Draft, *, gpus: int, told: bool) -> list[Problem]:
    """Everything that is wrong. `told`: the backend has said what it knows."""
    report = Report(draft)
    _check_name(message, draft, report)
    if not draft.backend:
        report.add(
            "backend",
            f"nothing tells which backend runs model '{message.name}'; add backend: \"onnxruntime\" or another, "
            "or put the model's file into the version folder",
        )
    if message.max_batch_size < 0:
        report.add("max_batch_size", f"{message.max_batch_size} is negative; write 0 for a model that does not batch")
    _check_versions(message.version_policy, report)
    _check_files(message, report)
    check_tensors(message, report, told=told)
    check_batch_tensors(message, report)
    if draft.backend == "ensemble" or message.HasField("ensemble_scheduling"):
        check_ensemble(message, draft.backend, report)
    else:
        check_groups(message, report, gpus)
    if message.HasField("dynamic_batching"):
        check_dynamic_batching(message, report)
    if message.HasField("sequence_batching"):
        check_sequence_batching(message, report)
    check_warmups(message, report)
    if message.response_cache.enable and message.model_transaction_policy.decoupled:
        report.add(
            "response_cache.enable",
            "a decoupled model's responses cannot be cached; remove response_cache or model_transaction_policy",
        )
    _check_metrics(message.model_metrics, report)
    return report.problems


def check_model_filenames(draft: Draft) -> None:
    """Raise if the configuration names a model file outside of the version's folder.

    To be called before a backend is asked to complete the draft, since that opens the file, or even runs it.
    """
    report = Report(draft)
    _check_model_files(draft.message, report)
    if report.problems:
        raise ConfigError(report.problems)


def _check_name(message: Any, draft: Draft, report: Report) -> None:
    folder = draft.model_folder.name
    if message.name != folder:
        report.add(
            "name",
            f"unexpected directory name '{folder}' for model '{message.name}', "
            "directory name must equal model name; rename one of them",
        )
    elif not is_name(message.name):
        report.add(
            "name",
            f"'{message.name[:64]}' cannot name a model: use letters, digits, '_', '.' and '-', "
            "beginning with a letter, a digit or '_'",
        )


def _check_versions(policy: Any, report: Report) -> None:
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest" and policy.latest.num_versions < 1:
        report.add("version_policy.latest", "num_versions is 0, which would serve nothing; write 1 or more")
    if choice == "specific":
        if not policy.specific.versions:
            report.add("version_policy.specific", "lists no versions; write specific { versions: [ 1 ] }")
        wrong = [version for version in policy.specific.versions if version < 0]
        if wrong:
            report.add("version_policy.specific.versions", f"{wrong[0]} is negative; versions are 0, 1, 2, ...")


def _check_files(message: Any, report: Report) -> None:
    _check_model_files(message, report)
    for index, output in enumerate(message.output):
        if output.label_filename:
            report.check_file(f"output[{index}].label_filename", "", output.label_filename)


def _check_model_files(message: Any, report: Report) -> None:
    named = {"default_model_filename": message.default_model_filename}
    named |= {f"cc_model_filenames.{capability}": name for capability, name in message.cc_model_filenames.items()}
    for place, name in named.items():
        inside = report.check_inside(place, name, "the version folder")
        if inside and any(len(part.encode(errors="surrogatepass")) > _PART_BYTES for part in name.split("/")):
            report.add(place, f"'{name[:64]}...' is longer than any file's name; correct it")


def _check_metrics(metrics: Any, report: Report) -> None:
    for index, control in enumerate(metrics.metric_control):
        place = f"model_metrics.metric_control[{index}]"
        if not control.metric_identifier.family:
            report.add(place, "names no metric; add metric_identifier { family: ... }")
        buckets = list(control.histogram_options.buckets)
        if any(not low < high for low, high in pairwise(buckets)):
            report.add(f"{place}.histogram_options.buckets", "are not in ascending order; sort them")
