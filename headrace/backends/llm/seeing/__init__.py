# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips in prompts: what a vision-language model sees, as embeddings in the place of tokens."""
