# SPDX-License-Identifier: Apache-2.0
"""Images and videos, decoded within limits."""
