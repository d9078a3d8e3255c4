# SPDX-License-Identifier: Apache-2.0
"""OpenAI's protocol over the data plane."""
