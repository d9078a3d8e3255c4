# SPDX-License-Identifier: Apache-2.0
"""Images and videos in prompts: multimodal inputs, their processors and the image encoder."""
