# SPDX-License-Identifier: Apache-2.0
"""`headrace batch`: a command line to what `headrace.programs.batch` runs, and its summary for people and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.log_options import LogLevel, LogStyle
from headrace.cli.results import Json, print_json_line

if TYPE_CHECKING:
    from headrace.jobs.batch.settings import BatchSettings
    from headrace.jobs.batch.summary import BatchSummary

ITEMS_FAILED = 3
"""Exit code: finished, and some items have an error for a result."""

_MODEL, _ITEMS, _SPEED, _PLACES = "Model", "Which items", "How many at once", "Places"


def batch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A file, a folder, hf_model://ORG/NAME, or a name in --repository.")
    ],
    input: Annotated[
        str, typer.Argument(metavar="INPUT", help="A folder, a .jsonl or a .parquet file; here or in a cloud.")
    ],
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="A .jsonl or a .parquet file, here or in a cloud; or a folder here.")
    ],
    parameters: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help='Of every request: {"prompt": "...", "max_new_tokens": 64}. Items may differ.',
            rich_help_panel=_MODEL,
        ),
    ] = "",
    repository: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where MODEL is a name.", rich_help_panel=_MODEL)
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Where the model's files do not tell: language, vision_language, classifier, detector, embedding, tensors.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    network_arch: Annotated[
        str,
        typer.Option("--network-arch", "--network_arch", metavar="NAME", help="cosmos-rl, ...", rich_help_panel=_MODEL),
    ] = "",
    specs: Annotated[
        str,
        typer.Option(
            metavar="JSON", help='More about the model: {"max_batch_size": 64, "dtype": ...}.', rich_help_panel=_MODEL
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the first N items.", rich_help_panel=_ITEMS)
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Every N-th item from the I-th on. {shard} in OUTPUT becomes I-of-N.",
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
        typer.Option("--retry-failed", help="Compute items again that failed before.", rich_help_panel=_ITEMS),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over where there are results already.", rich_help_panel=_ITEMS)
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Items sent together. Default: the model's largest.", rich_help_panel=_SPEED
        ),
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests under way. Default: by the model.", rich_help_panel=_SPEED),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For downloads, and for results on their way to a cloud.", rich_help_panel=_PLACES
        ),
    ] = None,
    media_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder whose files a manifest may name, beside its own. Repeatable.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    private_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="A host or network at a private address that input and media may come from. Repeatable.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON, as cloud_metadata of a job. Default: what the environment has.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="For what is under way at SIGTERM.", rich_help_panel=_SPEED)
    ] = 10.0,
    as_json: Json = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Run a model once over many items and write a result for each.

    A job that was stopped or killed goes on where it was when the same command is given again.
    Exit codes: 0 all done; 3 done, and some items failed; 1 stopped by a failure; 2 not begun; 128 + signal.

    Examples:

        headrace batch ./model.onnx items.jsonl results.jsonl

        headrace batch ./vit-classifier ./photos results.jsonl --parameters '{"top_k": 3}'

        headrace batch hf_model://Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl s3://bucket/answers.jsonl

        headrace batch resnet50 ./photos 'results-{shard}.jsonl' --repository ./models --shard 2/4
    """
    from typing import cast

    from headrace.cli.checks import or_exit
    from headrace.cli.progress import logging_beside_bars
    from headrace.core.telemetry.logs import LogFormat
    from headrace.jobs.batch.settings import BatchSettings, Shard, cache_folder
    from headrace.programs.batch import Interrupted, run_batch
    from headrace.programs.microservice import end_process

    with or_exit():
        settings = BatchSettings(
            model,
            input,
            output,
            repository=repository,
            network_arch=network_arch,
            task=task,
            specs=_object("--specs", specs),
            parameters=_object("--parameters", parameters),
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
                typer.secho(f"headrace: {error.message}", fg="yellow", err=True)
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
    from headrace.core.telemetry.logs import one_line

    if as_json:
        print_json_line(summary.as_json())
        return
    counts = f"{summary.total} items: {summary.succeeded} done, {summary.failed} failed, {summary.left} left"
    before = f" ({summary.resumed} of them before)" if summary.resumed else ""
    typer.echo(f"{counts}{before}; {summary.seconds:.1f} s, {summary.items_per_second:.1f} items/s")
    if summary.skipped_files:
        typer.echo(f"{summary.skipped_files} files of {settings.input} are not for this model and were left out")
    for each in summary.failures:
        name = "" if each.id is None else f" ({one_line(str(each.id))[:80]})"
        typer.echo(f"  item {each.index}{name}: {one_line(each.message)}", err=True)
    if summary.state == "finished":
        typer.echo(f"results: {summary.output}")
    elif summary.state == "cancelled":
        typer.secho(f"headrace: {summary.reason}: run the same command again to go on", fg="yellow", err=True)
    else:
        typer.secho(f"headrace: {one_line(summary.reason)}", fg="red", err=True)


def _object(option: str, text: str) -> dict[str, Any]:
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
    return CloudCredentials.from_metadata(_object("--credentials", content))
