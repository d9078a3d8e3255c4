# SPDX-License-Identifier: Apache-2.0
"""Read images and videos from URLs, within limits."""
