# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP API over the data plane: chat completions, completions, embeddings and models."""
