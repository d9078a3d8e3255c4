# SPDX-License-Identifier: Apache-2.0
"""Load on an OpenAI-compatible API: prompts and answers of given sizes, and the timing of tokens.

Used by `headrace bench --protocol openai` and by BenchmarkJobs.
"""
