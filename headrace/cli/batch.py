# SPDX-License-Identifier: Apache-2.0
"""`headrace batch`: parse the command line, run a batch job, and print its summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common_options import Json, LogLevel, LogStyle, ModelTask, print_json_line

if TYPE_CHECKING:
    from headrace.jobs.batch.progress import BatchSummary
    from headrace.jobs.batch.settings import BatchSettings

ITEMS_FAILED = 3
"""Exit code: finished, but some items failed."""

_MODEL, _ITEMS, _SPEED, _PLACES = "Model", "Items", "Concurrency", "Files and credentials"


def batch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="File, folder, hf_model://ORG/NAME, or a name in --repository.")
    ],
    input: Annotated[
        str, typer.Argument(metavar="INPUT", help="Folder, .jsonl or .parquet file; local or in object storage.")
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT", help=".jsonl or .parquet file, local or in object storage; or a local folder."
        ),
    ],
    parameters: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help='Parameters of every request: {"prompt": "...", "max_new_tokens": 64}. Items may override them.',
            rich_help_panel=_MODEL,
        ),
    ] = "",
    repository: Annotated[
        str, typer.Option(metavar="FOLDER", help="Model repository in which MODEL is a name.", rich_help_panel=_MODEL)
    ] = "",
    task: ModelTask = "",
    network_arch: Annotated[
        str,
        typer.Option(
            "--network-arch",
            "--network_arch",
            metavar="NAME",
            help="Architecture: cosmos-rl, ...",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    specs: Annotated[
        str,
        typer.Option(
            metavar="JSON", help='Model settings: {"max_batch_size": 64, "dtype": ...}.', rich_help_panel=_MODEL
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Process only the first N items.", rich_help_panel=_ITEMS)
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Process every N-th item from the I-th on. {shard} in OUTPUT becomes I-of-N.",
            rich_help_panel=_ITEMS,
        ),
    ] = "",
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write results in the order of the items.", rich_help_panel=_ITEMS)
    ] = False,
    max_failures: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Stop when more items than this have failed.", rich_help_panel=_ITEMS),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Retry items that failed in an earlier run.", rich_help_panel=_ITEMS),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard existing results and start over.", rich_help_panel=_ITEMS)
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Items per batch (default: the model's maximum).", rich_help_panel=_SPEED
        ),
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Concurrent requests (default: depends on the model).", rich_help_panel=_SPEED
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for downloads and for results before upload.", rich_help_panel=_PLACES
        ),
    ] = None,
    media_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Additional folder whose files a manifest may use. Repeatable.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    private_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Private host or network that input and media may be downloaded from. Repeatable.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file like a job's cloud_metadata (default: credentials of the environment).",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    grace_seconds: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Time for open requests after SIGTERM.", rich_help_panel=_SPEED),
    ] = 10.0,
    as_json: Json = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Run a model once over many items and write a result for each.

    Run the same command again to resume a job that was stopped or killed. Exit codes: 0 done; 3 done, but some items
    failed; 1 stopped by an error; 2 not started; 128 + signal.

    Examples:

        headrace batch ./model.onnx items.jsonl results.jsonl

        headrace batch ./vit-classifier ./photos results.jsonl --parameters '{"top_k": 3}'

        headrace batch hf_model://Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl s3://bucket/answers.jsonl

        headrace batch resnet50 ./photos 'results-{shard}.jsonl' --repository ./models --shard 2/4
    """
    from typing import cast

    from headrace.cli.checks import exit_on_error, print_error
    from headrace.cli.progress import logging_beside_bars
    from headrace.core.files import cache_folder
    from headrace.core.telemetry.logs import LogFormat
    from headrace.jobs.batch.settings import BatchSettings, Shard
    from headrace.programs.batch import Interrupted, run_batch
    from headrace.programs.microservice import end_process

    with exit_on_error():
        settings = BatchSettings(
            model,
            input,
            output,
            repository=repository,
            network_arch=network_arch,
            task=task,
            specs=_parse_object("--specs", specs),
            parameters=_parse_object("--parameters", parameters),
            ordered=ordered,
            limit=limit,
            shard=Shard.parse(shard),
            max_failures=max_failures,
            retry_failed=retry_failed,
            overwrite=overwrite,
            batch_size=batch_size,
            in_flight=in_flight,
            grace_seconds=grace_seconds,
            folder=cache_dir or cache_folder(),
            media_folders=tuple(media_folder or ()),
            private_hosts=tuple(private_host or ()),
            credentials=_credentials(credentials),
        )
        with logging_beside_bars(log_level, cast("LogFormat", log_format), bars=True) as progress:
            try:
                summary, number = run_batch(settings, progress)
            except Interrupted as error:
                print_error(error.message)
                end_process(128 + error.number)
                raise typer.Exit(128 + error.number) from None
    code = 128 + number if number and summary.state == "cancelled" else _exit_code(summary)
    _show(summary, settings, as_json=as_json)
    end_process(code)
    raise typer.Exit(code)


def _exit_code(summary: BatchSummary) -> int:
    from headrace.cli.checks import FAILED

    if summary.state != "finished":
        return FAILED
    return ITEMS_FAILED if summary.failed else 0


def _show(summary: BatchSummary, settings: BatchSettings, *, as_json: bool) -> None:
    from headrace.cli.checks import print_error
    from headrace.core.telemetry.logs import one_line

    if as_json:
        print_json_line(summary.as_json())
        return
    counts = f"{summary.total} items: {summary.succeeded} done, {summary.failed} failed, {summary.left} left"
    before = f" ({summary.resumed} in earlier runs)" if summary.resumed else ""
    typer.echo(f"{counts}{before}; {summary.seconds:.1f} s, {summary.items_per_second:.1f} items/s")
    if summary.skipped_files:
        typer.echo(f"skipped {summary.skipped_files} files of {settings.input} that are not for this model")
    for failure in summary.failures:
        name = "" if failure.id is None else f" ({one_line(str(failure.id))[:80]})"
        typer.echo(f"  item {failure.index}{name}: {one_line(failure.message)}", err=True)
    if summary.state == "finished":
        typer.echo(f"results: {summary.output}")
    elif summary.state == "cancelled":
        print_error(summary.reason, "run the same command again to resume")
    else:
        print_error(summary.reason)


def _parse_object(option: str, text: str) -> dict[str, Any]:
    import json

    from headrace.core.errors import InvalidArgument

    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidArgument(f'{option} is not a JSON object: write {{"name": value}}')
    return value


def _credentials(path: Path | None) -> Any:
    from headrace.core.errors import InvalidArgument
    from headrace.models.storage.credentials import CloudCredentials

    if path is None:
        return None
    try:
        content = path.read_text()
    except OSError as error:
        raise InvalidArgument(f"--credentials {path} cannot be read: {error.strerror}") from None
    return CloudCredentials.from_metadata(_parse_object("--credentials", content))
