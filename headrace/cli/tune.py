# SPDX-License-Identifier: Apache-2.0
"""`headrace tune`: find batch size, delay and instances for a latency target, by measurement."""

from __future__ import annotations

from typing import Annotated

import typer


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    latency_target_ms: Annotated[float, typer.Option(metavar="MS", min=0.001, help="What answers may take.")],
    repository: Annotated[
        str, typer.Option(metavar="DIR", help="The folder with the model's folder: a private server is started on it.")
    ] = "",
    url: Annotated[
        str, typer.Option(metavar="URL", help="Or a running server with --model-control-mode explicit.")
    ] = "",
    percentile: Annotated[
        float, typer.Option(metavar="SHARE", min=1.0, max=99.99, help="How many of 100 requests keep the target.")
    ] = 99.0,
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="Of each measurement.")] = 3.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Before each measurement.")] = 0.5,
    max_batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Largest batch to try; the model's own limit unless told.")
    ] = None,
    max_instances: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most instances to try; the number of cores unless told.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Most clients at the same time.")] = 256,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows in each request.")] = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=VALUE", help="As for `headrace bench`. Repeatable."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:SIZES", help="Sizes of an input that the model leaves open. Repeatable."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the winner into the model's configuration in --repository.")
    ] = False,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write all trials as JSON; - prints them instead of tables.")
    ] = "",
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Draw all trials into a file (matplotlib).")] = "",
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Send this header field. Repeatable.")
    ] = None,
) -> None:
    """Find the setting of a model that gives the most throughput within a latency target, by measuring.

    Tries max_batch_size, max_queue_delay_microseconds and the number of instances, one after the other, with as many clients
    as the target allows. The best are measured again; if they differ by no more than the noise, the simplest wins.
    Without --write, the lines for the configuration are printed. The exit code is 1 if no setting keeps the target.

    Examples:

        headrace tune resnet50 --repository models --latency-target-ms 20

        headrace tune resnet50 --repository models --latency-target-ms 20 --percentile 95 --max-batch 64 --write

        headrace tune bert --shape ids:128 --url http://localhost:8000 --latency-target-ms 50 --plot trials.png
    """
    from headrace.cli.checks import told
    from headrace.cli.tune_run import TuneWish, run_tune

    with told():
        run_tune(
            TuneWish(
                model=model,
                target_ms=latency_target_ms,
                repository=repository,
                url=url,
                percentile=percentile,
                duration=duration,
                warm_up=warm_up,
                max_batch=max_batch,
                max_instances=max_instances,
                max_concurrency=max_concurrency,
                rows=rows,
                inputs=tuple(inputs or ()),
                shapes=tuple(shape or ()),
                write=write,
                json_file=json_file,
                plot=plot,
                headers=tuple(headers or ()),
            )
        )
