# SPDX-License-Identifier: Apache-2.0
"""Run the batches of `/v1/batches` inside the inference server, with the runner of `jobs.batch`.

worker (one per process: which batches run here) -> batch_run (one batch: validate, compute, finish)
    -> input_lines (the input) -> jobs.batch.runner -> line_client (a line, by the handler of its endpoint)
    -> jobs.batch.ledger -> result_files (output and errors)

`api.openai` has the routes and the records. Nothing here knows HTTP connections.
"""
