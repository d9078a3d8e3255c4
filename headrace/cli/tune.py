# SPDX-License-Identifier: Apache-2.0
"""`headrace tune`: find the batch size, queue delay and instance count for a latency target, by measurement."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common_options import Headers, InputShapes, ModelName, RequestRows


def tune(
    model: ModelName,
    latency_target_ms: Annotated[float, typer.Option(metavar="MS", min=0.001, help="Latency target in milliseconds.")],
    repository: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder that contains the model's folder; a private server is started on it."),
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="A running server with --model-control-mode explicit, instead of --repository."
        ),
    ] = "",
    percentile: Annotated[
        float,
        typer.Option(
            metavar="PERCENT", min=1.0, max=99.99, help="Percentile of the latency that must meet the target."
        ),
    ] = 99.0,
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="Length of each measurement.")] = 3.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Warm-up before each measurement.")] = 0.5,
    max_batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Largest batch size to try (default: the model's limit).")
    ] = None,
    max_instances: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Largest instance count to try (default: number of cores).")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum concurrent requests.")] = 256,
    rows: RequestRows = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=VALUE", help="Input values, as for `headrace bench`. Repeatable."),
    ] = None,
    shape: InputShapes = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the best settings into the model's configuration in --repository.")
    ] = False,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write all trials as JSON; - prints them instead of tables.")
    ] = "",
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Plot all trials to a file (needs matplotlib).")] = "",
    headers: Headers = None,
) -> None:
    """Find the model settings with the highest throughput within a latency target, by measurement.

    Varies max_batch_size, max_queue_delay_microseconds and the instance count, one at a time, at the highest
    concurrency that meets the target. The best settings are measured again; if they differ by no more than the noise,
    the simplest wins. Without --write, the configuration is printed. The exit code is 1 if no setting meets the target.

    Examples:

        headrace tune resnet50 --repository models --latency-target-ms 20

        headrace tune resnet50 --repository models --latency-target-ms 20 --percentile 95 --max-batch 64 --write

        headrace tune bert --shape ids:128 --url http://localhost:8000 --latency-target-ms 50 --plot trials.png
    """
    from headrace.cli.checks import report_errors
    from headrace.cli.tune_run import TuneOptions, run_tune

    with report_errors():
        run_tune(
            TuneOptions(
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
