# SPDX-License-Identifier: Apache-2.0
"""The tables of `headrace models list`, `show`, `check` and `init`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.cli.client import Refused, ServerClient, model_path
from headrace.cli.init import InitResult
from headrace.cli.tables import average_ms, heading, line, open_console, state_cell, table
from headrace.engine.repository.check import RepositoryReport
from headrace.engine.repository.memory_budget import place_text
from headrace.models.config.messages import dtype_of_field, to_json
from headrace.models.config.problems import Problem
from headrace.models.storage.errors import readable_bytes

_COLUMNS = {
    "MODEL": "name",
    "VERSION": "version",
    "STATE": "state",
    "REQUESTS": "requests",
    "EXECUTIONS": "executions",
    "BATCH": "average_batch",
    "QUEUE ms": "average_queue_ms",
    "COMPUTE ms": "average_compute_ms",
    "REASON": "reason",
}
_NUMBERS = ("VERSION", "REQUESTS", "EXECUTIONS", "BATCH", "QUEUE ms", "COMPUTE ms")


def list_rows(index: list[dict[str, str]], stats: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per entry of the index. Missing statistics are None."""
    by_version = {(entry["name"], entry["version"]): entry for entry in stats["model_stats"]}
    rows = []
    for entry in index:
        name, version = entry["name"], entry.get("version", "")
        row: dict[str, Any] = {"name": name, "version": version, "state": entry.get("state", "")}
        row |= _numbers(by_version.get((name, version)))
        row["reason"] = entry.get("reason", "")
        rows.append(row)
    return rows


def _numbers(stats: dict[str, Any] | None) -> dict[str, Any]:
    if stats is None:
        keys = ("requests", "executions", "average_batch", "average_queue_ms", "average_compute_ms")
        return dict.fromkeys(keys)
    parts = stats["inference_stats"]
    executions = stats["execution_count"]
    computed = parts["queue"]["count"]
    compute_ns = sum(parts[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output"))
    return {
        "requests": parts["success"]["count"] + parts["fail"]["count"],
        "executions": executions,
        "average_batch": stats["inference_count"] / executions if executions else None,
        "average_queue_ms": parts["queue"]["ns"] / computed / 1e6 if computed else None,
        "average_compute_ms": compute_ns / computed / 1e6 if computed else None,
    }


def show_list(rows: list[dict[str, Any]]) -> None:
    """Print the table of models."""
    console = open_console()
    if not rows:
        console.print(line("no models: the repository is empty"))
        return
    cells = [[_cell(key, row[key]) for key in _COLUMNS.values()] for row in rows]
    console.print(table(list(_COLUMNS), cells, right=_NUMBERS))


def sleep_lines(report: dict[str, Any]) -> list[str]:
    """Return a line for each version of a model that was put to sleep or woken."""
    lines = []
    for version, sleep in report["versions"].items():
        text = f"{report['model']} version {version}: {sleep['state']}"
        text += f" at level {sleep['level']}" if sleep["level"] else ""
        text += f" after {sleep['seconds']:.3g} s" if sleep["seconds"] is not None else ""
        freed = [f"{readable_bytes(size)} of {place_text(location)}" for location, size in sleep["freed_bytes"].items()]
        lines.append(f"{text}, {' and '.join(freed)} given back" if freed else text)
    return lines


def _cell(key: str, value: Any) -> object:
    if key == "state":
        return state_cell(value or "not loaded")
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else value


WHY = {
    "full": "it could not grow: the maximum size was reached, or the next request did not fit",
    "preferred": "it had a preferred size",
    "delay expired": "its oldest request had waited max_queue_delay_microseconds",
    "shape change": "the next request had another shape; padding or ragged batches combine such requests",
    "idle instance": "an instance was idle and the delay was 0; max_queue_delay_microseconds makes batches wait for more",
    "one at a time": "the model has no dynamic_batching",
    "sequence": "it contains the sequences that had a request",
}
"""The meaning of each batching reason, and what changes it. The console has the same texts, in timeline.js."""

_RECENT = 5


def fetch_model(server: ServerClient, name: str, version: str) -> dict[str, Any]:
    """Fetch everything about a model. Without `metadata` the model is in the repository but not loaded."""
    path = model_path(name, version)
    entries = [
        entry
        for entry in server.post("/v2/repository/index", {})
        if entry["name"] == name and version in ("", entry.get("version", ""))
    ]
    try:
        return {
            "index": entries,
            "metadata": server.get(path),
            "config": server.get(f"{path}/config"),
            "stats": server.get(f"{path}/stats")["model_stats"],
        }
    except Refused:
        if not entries:
            raise
        return {"index": entries}


def show_model(details: dict[str, Any]) -> None:
    """Print everything about a model."""
    console = open_console()
    rows = [
        [entry["name"], entry.get("version", ""), state_cell(entry.get("state", "not loaded")), entry.get("reason", "")]
        for entry in details["index"]
    ]
    console.print(table(["MODEL", "VERSION", "STATE", "REASON"], rows, right=["VERSION"]))
    if "metadata" not in details:
        return
    config = details["config"]
    _show_tensors(console, details["metadata"], config)
    _show_instances(console, config)
    console.print("\n", heading("Scheduling"), sep="")
    for text in scheduling_lines(config):
        console.print(line(text))
    for stats in details["stats"]:
        _show_load(console, stats)
        _show_statistics(console, stats)
        _show_batches(console, stats)


def _show_tensors(console: Console, metadata: dict[str, Any], config: dict[str, Any]) -> None:
    console.print("\n", heading(f"Tensors ({metadata['platform']})"), sep="")
    rows = []
    for kind in ("input", "output"):
        more = {tensor["name"]: tensor for tensor in config.get(kind, [])}
        rows += [
            [
                kind,
                tensor["name"],
                tensor["datatype"] or "any",
                tensor["shape"] if tensor["datatype"] else "any",
                _notes(more.get(tensor["name"], {})),
            ]
            for tensor in metadata[f"{kind}s"]
        ]
    console.print(table(["", "NAME", "TYPE", "SHAPE", "NOTES"], rows))
    for text in language_model_lines(config):
        console.print(line(text))


def language_model_lines(config: dict[str, Any]) -> list[str]:
    """Return what a model's parameters say about its weights, speculative decoding and evicted KV pages."""
    parameters = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
    lines = []
    if parameters.get("weight_scheme"):
        lines.append(f"Quantised weights: {parameters['weight_scheme']}.")
    speculation = parameters.get("speculation", "").lower()
    if speculation == "draft":
        lines.append(f"Speculative decoding: drafts of the model in {parameters.get('draft_model', '')}.")
    elif speculation:
        lines.append(f"Speculative decoding: {speculation}.")
    host_bytes = parameters.get("kv_host_bytes", "")
    if host_bytes.isdecimal() and int(host_bytes):
        folder = parameters.get("kv_disk_path", "")
        disk = f", and in {folder}" if folder else ""
        lines.append(f"Evicted KV pages: kept in {readable_bytes(int(host_bytes))} of host memory{disk}.")
    return lines


def _notes(tensor: dict[str, Any]) -> str:
    notes = [text for key, text in (("optional", "optional"), ("allow_ragged_batch", "ragged")) if tensor.get(key)]
    if "reshape" in tensor:
        notes.append(f"reshaped to {tensor['reshape']['shape']}")
    if "pad_value" in tensor:
        notes.append(f"padded with {tensor['pad_value']:g}")
    if tensor.get("finite"):
        notes.append("finite numbers only")
    if tensor.get("padded_like"):
        notes.append(f"truncated like {tensor['padded_like']}")
    if tensor.get("label_filename"):
        notes.append(f"labels in {tensor['label_filename']}")
    return ", ".join(notes)


def _show_instances(console: Console, config: dict[str, Any]) -> None:
    groups = config.get("instance_group", [])
    if not groups:
        return
    console.print("\n", heading("Instances"), sep="")
    rows = []
    for group in groups:
        resources = group.get("rate_limiter", {}).get("resources", [])
        rows.append(
            [
                group["name"],
                group["kind"].removeprefix("KIND_").lower(),
                group["count"],
                ", ".join(map(str, group["gpus"])) or "-",
                group.get("runs", "RUNS_AUTO").removeprefix("RUNS_").lower(),
                ", ".join(f"{resource['count']} {resource['name']}" for resource in resources) or "-",
            ]
        )
    console.print(table(["GROUP", "KIND", "COUNT", "GPUS", "RUNS", "NEEDS"], rows, right=["COUNT"]))


def scheduling_lines(config: dict[str, Any]) -> list[str]:
    """Describe in sentences how requests reach the instances."""
    size = config["max_batch_size"]
    lines = [f"Maximum batch size: {size}." if size else "No batching: max_batch_size is 0."]
    if "dynamic_batching" in config:
        lines += _dynamic_lines(config["dynamic_batching"])
    elif "sequence_batching" in config:
        strategy = "oldest" if "oldest" in config["sequence_batching"] else "direct"
        idle = config["sequence_batching"]["max_sequence_idle_microseconds"] / 1e6
        lines.append(
            f"Sequence batching, strategy '{strategy}'; sequences time out after {idle:g} s without a request."
        )
    elif "ensemble_scheduling" in config:
        steps = ", ".join(step["model_name"] for step in config["ensemble_scheduling"]["step"])
        lines.append(f"An ensemble of {steps}: each step waits in the queue of its own model.")
    else:
        lines.append("One request at a time: there is no dynamic_batching.")
    if config.get("response_cache", {}).get("enable"):
        lines.append("Responses come from the response cache if they are in it.")
    return lines


def _dynamic_lines(batching: dict[str, Any]) -> list[str]:
    lines = []
    if batching.get("preferred_batch_size"):
        lines.append(f"Preferred sizes: {', '.join(map(str, batching['preferred_batch_size']))}.")
    if batching.get("max_queue_delay_auto"):
        lines.append(
            f"The delay is chosen so that 99 % of requests take less than {batching['latency_target_ms']:g} ms."
        )
    else:
        delay = batching["max_queue_delay_microseconds"]
        lines.append(
            f"A batch waits {delay} us for more requests." if delay else "A batch never waits for more requests."
        )
    if batching.get("priority_levels"):
        lines.append(
            f"{batching['priority_levels']} priorities; {batching['default_priority_level']} for requests without one."
        )
    max_queue_size = batching.get("default_queue_policy", {}).get("max_queue_size", 0)
    if max_queue_size:
        lines.append(f"At most {max_queue_size} requests wait; more are rejected.")
    if batching.get("preserve_ordering"):
        lines.append("Responses keep the order of their requests.")
    return lines


def _show_statistics(console: Console, stats: dict[str, Any]) -> None:
    console.print("\n", heading(f"Statistics of version {stats['version']}"), sep="")
    executions = stats["execution_count"]
    average = f"{stats['inference_count'] / executions:.2f}" if executions else "-"
    failures = ", ".join(f"{count} {reason}" for reason, count in stats.get("failures", {}).items())
    console.print(
        line(f"{stats['inference_count']} rows in {executions} executions: {average} rows in an average batch.")
    )
    if failures:
        console.print(line(f"Failures: {failures}.", "red"))
    rows = [
        [part.replace("_", " "), values["count"], average_ms(values["ns"], values["count"])]
        for part, values in stats["inference_stats"].items()
        if values["count"] or part in ("success", "fail")
    ]
    console.print(table(["", "COUNT", "AVERAGE ms"], rows, right=["COUNT", "AVERAGE ms"]))


def _show_load(console: Console, stats: dict[str, Any]) -> None:
    stages = stats.get("load_seconds", {})
    if stages:
        console.print("\n", heading(f"Load of version {stats['version']}"), sep="")
        rows = [[name, f"{seconds:.3f}"] for name, seconds in stages.items()]
        console.print(table(["STAGE", "SECONDS"], rows, right=["SECONDS"]))


def _show_batches(console: Console, stats: dict[str, Any]) -> None:
    batching = stats.get("batching", {})
    reasons = batching.get("reasons", {})
    if not reasons:
        return
    console.print("\n", heading("Why batches have their size"), sep="")
    if batching.get("delay_auto"):
        console.print(
            line(
                f"The delay is {batching['delay_microseconds']} us now: the 99th percentile is {batching['p99_ms']:.1f} "
                f"ms at {batching['rows_per_second']:.0f} rows a second."
            )
        )
    total = sum(reasons.values())
    rows = [
        [f"{100 * count / total:.0f} %", count, reason, WHY.get(reason, "")]
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    console.print(table(["SHARE", "BATCHES", "REASON", "MEANING"], rows, right=["SHARE", "BATCHES"]))
    recent = batching["recent"][-_RECENT:]
    console.print("\n", line(f"The last {len(recent)} batches, newest last:"), sep="")
    rows = [
        [
            batch["rows"],
            batch["requests"],
            batch["reason"],
            batch["oldest_waited_microseconds"],
            batch["left_waiting"],
            batch["instance"],
        ]
        for batch in recent
    ]
    columns = ["ROWS", "REQUESTS", "REASON", "WAITED us", "LEFT WAITING", "INSTANCE"]
    console.print(table(columns, rows, right=["ROWS", "REQUESTS", "WAITED us", "LEFT WAITING"]))


def report_json(report: RepositoryReport) -> dict[str, Any]:
    """Return the report as the document that `--json` prints."""
    return {
        "models": list(report.models),
        "problems": [asdict(problem) for problem in report.problems],
        "warnings": [asdict(problem) for problem in report.warnings],
    }


def show_report(report: RepositoryReport) -> None:
    """Print the mistakes, one line each, then the models."""
    console = open_console()
    for problem in report.problems:
        # One line per mistake, so that it can be copied or parsed; the terminal wraps it.
        console.print(Text(str(problem), "red"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
    if report.problems or report.warnings:
        console.print()
    rows = [[name, *_verdict(name, report)] for name in report.models]
    if rows:
        console.print(table(["MODEL", "RESULT", "MISTAKES"], rows, right=["MISTAKES"]))
    else:
        console.print(Text("no models found: give the folder that contains the model folders"))


def _verdict(name: str, report: RepositoryReport) -> tuple[Text, int]:
    mistakes = sum(_is_about(problem, name) for problem in report.problems)
    if mistakes:
        return Text("wrong", "red"), mistakes
    if any(_is_about(problem, name) for problem in report.warnings):
        return Text("partly checked", "yellow"), 0
    return Text("fine", "green"), 0


def _is_about(problem: Problem, name: str) -> bool:
    return problem.path == name or problem.path.startswith(f"{name}/")


def result_json(result: InitResult) -> dict[str, Any]:
    """Return the result of `models init` as the document that `--json` prints."""
    return {
        "name": result.config.name or result.folder.resolve().name,
        "version": result.version,
        "folder": str(result.folder),
        "is": result.detected.what,
        "backend": result.detected.backend,
        "files": [{"source": str(part.source), "name": part.name} for part in result.detected.parts],
        "wrote": [str(path) for path in result.wrote],
        "config": to_json(result.config),
        "notes": list(result.notes),
        "remarks": list(result.remarks),
    }


def show_result(result: InitResult) -> None:
    """Print the result of `models init`."""
    console = open_console()
    detected = result.detected
    parts = [f"{detected.what}", *["part of it"] * (len(detected.parts) - 1)]
    rows = [
        [part.source.name, is_, detected.backend, _size(part.source, result)]
        for part, is_ in zip(detected.parts, parts, strict=True)
    ]
    console.print(table(["FILE", "IS", "BACKEND", "SIZE"], rows, right=["SIZE"]))
    tensors = [
        [side, tensor.name, _type_name(tensor), list(tensor.dims) or "any"]
        for side in ("input", "output")
        for tensor in getattr(result.config, side)
    ]
    if tensors:
        batch = result.config.max_batch_size
        console.print("\n", heading(f"Tensors, in batches of up to {batch}" if batch else "Tensors"), sep="")
        console.print(table(["", "NAME", "TYPE", "DIMS"], tensors))
    console.print()
    for path in result.wrote:
        console.print(line(f"wrote {path}"), soft_wrap=True)
    for remark in result.remarks:
        console.print(line(f"note: {remark}"), soft_wrap=True)
    for note in result.notes:
        console.print(line(f"to do: {note}", "yellow"), soft_wrap=True)
    if not result.notes:
        console.print(line(f"next: headrace serve {result.folder.parent}"), soft_wrap=True)


def _type_name(tensor: Any) -> str:
    dtype = dtype_of_field(tensor)
    return "any" if dtype is None else dtype.name


def _size(source: Path, result: InitResult) -> str:
    # The source may have been moved.
    part = next(part for part in result.detected.parts if part.source == source)
    path = source if source.exists() else result.folder / str(result.version) / part.name
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    total = float(sum(file.stat().st_size for file in files))
    for unit in ("B", "KB", "MB"):
        if total < 1000:
            return f"{total:.0f} {unit}" if unit == "B" else f"{total:.1f} {unit}"
        total /= 1000
    return f"{total:.1f} GB"
