# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: small changes to a model's layers, chosen by each request, several of them in one step."""
