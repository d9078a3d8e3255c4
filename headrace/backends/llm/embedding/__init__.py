# SPDX-License-Identifier: Apache-2.0
"""Models that turn a text into a vector. Knows nothing of generating: no pages, no scheduler, no sampling."""
