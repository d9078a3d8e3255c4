# SPDX-License-Identifier: Apache-2.0
"""Jobs. NVIDIA TAO's programs: the job API with login, the inference microservice and batch inference.

`service` is what the job API, the gateway and the command line call; `store` keeps records in SQL; `api` has the HTTP
routes; `microservice` serves one model as a job; `batch` runs a model once over many items. `openai_batches` computes the
batches of the inference server's `/v1/batches`.
"""
