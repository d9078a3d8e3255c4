# SPDX-License-Identifier: Apache-2.0
"""Speech recognition models (Whisper): loading, decoding and timestamps."""
