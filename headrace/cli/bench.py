# SPDX-License-Identifier: Apache-2.0
"""`headrace bench`: measure a model of a running server under load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from headrace.cli.common_options import (
    SERVER_URL,
    CaFile,
    CertFile,
    Headers,
    InputShapes,
    KeyFile,
    RequestRows,
    RequestTimeout,
)
from headrace.cli.fleet_options import Context, Kube, Kubeconfig, Namespace, where_of, with_fleet

_CHAT = "Language models (--protocol openai)"
_SERVICE = "Fleet"


def bench(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Name of the model (default with openai: the only one).")
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            metavar="URL", help=f"Server URL: http://, https://, grpc:// or grpcs:// (default: {SERVER_URL})."
        ),
    ] = "",
    service: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_SERVICE,
            help="InferenceService to measure at its URL, with the protocol openai by default.",
        ),
    ] = "",
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    version: Annotated[str, typer.Option(metavar="VERSION", help="Model version (default: the server's choice).")] = "",
    protocol: Annotated[
        str, typer.Option(metavar="http|grpc|predict|openai", help="Protocol (default: that of the URL).")
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Closed loop: number of connections, one request each. Several values: a sweep."
        ),
    ] = "16",
    rate: Annotated[
        str,
        typer.Option(metavar="R[,R...]", help="Open loop: requests per second, independent of responses."),
    ] = "",
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Open loop: constant intervals instead of Poisson arrivals.")
    ] = False,
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="Length of the measurement.")] = 10.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="Warm-up before the measurement.")] = 2.0,
    rows: RequestRows = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=VALUE",
            help="A shape (3,224,224), file.npy, file.json, or what `headrace infer` takes. Repeatable.",
        ),
    ] = None,
    shape: InputShapes = None,
    timeout: RequestTimeout = 30.0,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - prints them instead of tables.")
    ] = "",
    plot: Annotated[
        str, typer.Option(metavar="FILE.png", help="Plot the latencies to a file (needs matplotlib).")
    ] = "",
    headers: Headers = None,
    ca: CaFile = "",
    cert: CertFile = "",
    key: KeyFile = "",
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            rich_help_panel=_CHAT,
            help="text-to-text, image-to-text, text-to-embeddings or image-to-embeddings.",
        ),
    ] = "text-to-text",
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            rich_help_panel=_CHAT,
            help="Tokens per prompt and response: D(100,100), N(480,240)/(300,150), U(50,100)/(200,250); E(128) for "
            "embeddings; I(512,512) for images. Repeatable.",
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=_CHAT, help="Also stop a run after so many requests.")
    ] = 1_000_000,
    params: Annotated[
        str, typer.Option(metavar="JSON", rich_help_panel=_CHAT, help="Extra fields of every request, as an object.")
    ] = "",
    dataset: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            rich_help_panel=_CHAT,
            help="Prompts: a .jsonl, .json, .csv or .txt file, a folder of them, or a URL (s3://, hf://, https://, ...).",
        ),
    ] = "",
    report: Annotated[
        str, typer.Option(metavar="FILE.html", rich_help_panel=_CHAT, help="Write a report with charts and a table.")
    ] = "",
    output: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            rich_help_panel=_CHAT,
            help="Save results.json and report.html to a folder, or s3://bucket/prefix, gs://, az://.",
        ),
    ] = "",
    about: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", rich_help_panel=_CHAT, help="Extra line of the report. Repeatable."),
    ] = None,
) -> None:
    """Measure a model under load: requests per second, errors, latencies, and the server's own statistics.

    Inputs are random numbers in the shapes that the model takes. In an open loop, latency is measured from the
    scheduled time of a request, so that delays by a stalled server count. The exit code is 1 if no request succeeded.

    Examples:

        headrace bench resnet50

        headrace bench resnet50 --concurrency 1,4,16,64 --plot sweep.png

        headrace bench resnet50 --rate 500 --duration 30 --json numbers.json

        headrace bench bert --shape ids:128 --url grpc://localhost:8001

        headrace bench production --protocol predict --rows 8 --header x-api-key:secret

        headrace bench llama --protocol openai --scenario "D(100,100)" --concurrency 1,4,16 --report llama.html

        headrace bench --service llama-chat --scenario "D(100,100)" --concurrency 1,4,16 --report llama.html

        headrace bench --service llama-chat --kube -n team --output s3://numbers/llama-chat
    """
    from headrace.cli.bench_run import BenchOptions, run_bench
    from headrace.cli.checks import report_errors
    from headrace.core.errors import InvalidArgument

    service_facts: tuple[str, ...] = ()
    if service:
        from headrace.cli.bench_run import service_at

        protocol = protocol or "openai"
        url, service_facts = with_fleet(
            where_of(kube, kubeconfig, context), lambda fleet: service_at(fleet, namespace, service, url)
        )
    else:
        fleet_options = {"--kube": kube, "--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace}
        with report_errors():
            _refuse(fleet_options, "selects a fleet: add --service")
    url = url or SERVER_URL
    if protocol == "openai":
        from headrace.cli.bench_run import ChatOptions, run_chat

        chat_options = {"--rate": rate, "--uniform": uniform, "--input": inputs, "--shape": shape, "--plot": plot}
        with report_errors():
            _refuse(
                {**chat_options, "--version": version, "--rows": rows != 1}, "cannot be used with --protocol openai"
            )
            run_chat(
                ChatOptions(
                    model=model,
                    url=url,
                    task=task,
                    scenarios=tuple(scenario or ()),
                    concurrency=concurrency,
                    duration=duration,
                    max_requests=max_requests,
                    timeout=timeout,
                    params=params,
                    dataset=dataset,
                    json_file=json_file,
                    report=report,
                    output=output,
                    about=(*service_facts, *(about or ())),
                    headers=tuple(headers or ()),
                    ca=ca,
                    cert=cert,
                    key=key,
                )
            )
        return
    chat_options = {
        "--scenario": scenario,
        "--params": params,
        "--dataset": dataset,
        "--report": report,
        "--output": output,
    }
    with report_errors():
        _refuse({**chat_options, "--about": about}, "is for language models: add --protocol openai")
        if not model:
            raise InvalidArgument("MODEL is missing: give the name of the model; `headrace models list` shows them")
        run_bench(
            BenchOptions(
                model=model,
                url=url,
                version=version,
                protocol=protocol,
                concurrency=concurrency,
                rate=rate,
                uniform=uniform,
                duration=duration,
                warm_up=warm_up,
                rows=rows,
                inputs=tuple(inputs or ()),
                shapes=tuple(shape or ()),
                timeout=timeout,
                json_file=json_file,
                plot=plot,
                headers=tuple(headers or ()),
                ca=ca,
                cert=cert,
                key=key,
            )
        )


def _refuse(options: Mapping[str, object], reason: str) -> None:
    from headrace.core.errors import InvalidArgument

    for name, value in options.items():
        if value:
            raise InvalidArgument(f"{name} {reason}")
