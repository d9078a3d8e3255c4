# SPDX-License-Identifier: Apache-2.0
"""`headrace models show`: everything a server tells about one model, and why its batches have the size they have."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from headrace.cli.client import Refused, ServerClient, model_path
from headrace.cli.tables import average_ms, heading, line, open_console, state_cell, table

WHY = {
    "full": "it could not grow: the largest size was reached, or the next request would not have fitted",
    "preferred": "it had a preferred size",
    "delay expired": "its oldest request had waited max_queue_delay_microseconds",
    "shape change": "the next request had another shape; padding or ragged batches let such requests go together",
    "idle instance": "an instance was idle and the delay was 0; max_queue_delay_microseconds makes batches wait for more",
    "one at a time": "the model has no dynamic_batching",
    "sequence": "its members were those sequences that had a request",
}
"""What each reason of a batch means, and what changes it."""

_RECENT = 5


def ask_model(server: ServerClient, name: str, version: str) -> dict[str, Any]:
    """What the server knows. Without `metadata` the model is in the repository and does not serve."""
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


def show_model(seen: dict[str, Any]) -> None:
    """Print it all."""
    console = open_console()
    rows = [
        [entry["name"], entry.get("version", ""), state_cell(entry.get("state", "not loaded")), entry.get("reason", "")]
        for entry in seen["index"]
    ]
    console.print(table(["MODEL", "VERSION", "STATE", "REASON"], rows, right=["VERSION"]))
    if "metadata" not in seen:
        return
    config = seen["config"]
    _show_tensors(console, seen["metadata"], config)
    _show_instances(console, config)
    console.print("\n", heading("Scheduling"), sep="")
    for text in scheduling_lines(config):
        console.print(line(text))
    for stats in seen["stats"]:
        _show_statistics(console, stats)
        _show_batches(console, stats)


def _show_tensors(console: Console, metadata: dict[str, Any], config: dict[str, Any]) -> None:
    console.print("\n", heading(f"Tensors ({metadata['platform']})"), sep="")
    rows = []
    for what in ("input", "output"):
        more = {tensor["name"]: tensor for tensor in config.get(what, [])}
        rows += [
            [
                what,
                each["name"],
                each["datatype"] or "any",
                each["shape"] if each["datatype"] else "any",
                _notes(more.get(each["name"], {})),
            ]
            for each in metadata[f"{what}s"]
        ]
    console.print(table(["", "NAME", "TYPE", "SHAPE", "NOTES"], rows))


def _notes(tensor: dict[str, Any]) -> str:
    notes = [word for key, word in (("optional", "optional"), ("allow_ragged_batch", "ragged")) if tensor.get(key)]
    if "reshape" in tensor:
        notes.append(f"reshaped to {tensor['reshape']['shape']}")
    if "pad_value" in tensor:
        notes.append(f"padded with {tensor['pad_value']:g}")
    if tensor.get("finite"):
        notes.append("finite numbers only")
    if tensor.get("padded_like"):
        notes.append(f"cut like {tensor['padded_like']}")
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
                ", ".join(f"{each['count']} {each['name']}" for each in resources) or "-",
            ]
        )
    console.print(table(["GROUP", "KIND", "COUNT", "GPUS", "RUNS", "NEEDS"], rows, right=["COUNT"]))


def scheduling_lines(config: dict[str, Any]) -> list[str]:
    """How requests get to the instances, in sentences."""
    size = config["max_batch_size"]
    lines = [f"At most {size} rows in a batch." if size else "No batches: max_batch_size is 0."]
    if "dynamic_batching" in config:
        lines += _dynamic_lines(config["dynamic_batching"])
    elif "sequence_batching" in config:
        strategy = "oldest" if "oldest" in config["sequence_batching"] else "direct"
        idle = config["sequence_batching"]["max_sequence_idle_microseconds"] / 1e6
        lines.append(f"Sequences, by the strategy '{strategy}'; one that is silent for {idle:g} s is given up.")
    elif "ensemble_scheduling" in config:
        steps = ", ".join(step["model_name"] for step in config["ensemble_scheduling"]["step"])
        lines.append(f"An ensemble of {steps}: each step waits in the queue of its own model.")
    else:
        lines.append("One request after the other: there is no dynamic_batching.")
    if config.get("response_cache", {}).get("enable"):
        lines.append("Answers come from the response cache where it has them.")
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
    most = batching.get("default_queue_policy", {}).get("max_queue_size", 0)
    if most:
        lines.append(f"At most {most} requests wait; more are refused.")
    if batching.get("preserve_ordering"):
        lines.append("Answers keep the order of their requests.")
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


def _show_batches(console: Console, stats: dict[str, Any]) -> None:
    batching = stats.get("batching", {})
    reasons = batching.get("reasons", {})
    if not reasons:
        return
    console.print("\n", heading("Why batches have the size they have"), sep="")
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
    console.print("\n", line(f"The last {len(recent)}, the newest at the end:"), sep="")
    rows = [
        [
            each["rows"],
            each["requests"],
            each["reason"],
            each["oldest_waited_microseconds"],
            each["left_waiting"],
            each["instance"],
        ]
        for each in recent
    ]
    columns = ["ROWS", "REQUESTS", "REASON", "WAITED us", "LEFT WAITING", "INSTANCE"]
    console.print(table(columns, rows, right=["ROWS", "REQUESTS", "WAITED us", "LEFT WAITING"]))
