# SPDX-License-Identifier: Apache-2.0
"""One model over many items, once: a folder or a manifest in, a file of results out.

    cli, jobs' runner -> app -> opening (the model) -> asking (items to answers)
                          |---> sources, parquet (the input) -> shaping
                          |---> ledger, job_file (the output, and what is done) -> delivering (where it goes)
                          |---> running (all of it at once)

Lives here: what an item is, how many are under way, what is written down so that a job goes on where it was killed. May not
live here: how a model computes (`engine`), what a kind of model takes (`microservice.kinds`), how a URL is fetched
(`storage`).
"""
