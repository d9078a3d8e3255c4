# SPDX-License-Identifier: Apache-2.0
"""Text into tokens and tokens into text: the tokenizer, chat templates, incremental detokenisation, stop texts."""
