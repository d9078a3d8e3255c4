# SPDX-License-Identifier: Apache-2.0
"""Load on what speaks OpenAI's API: prompts and answers of given sizes, and how fast their tokens come.

`headrace bench --protocol openai` calls it, and with that a BenchmarkJob. Lives here: scenarios, prompts, the streams that
are read with a clock beside them, and the report. A server is asked from outside; whose it is does not matter.
"""
