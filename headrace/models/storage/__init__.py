# SPDX-License-Identifier: Apache-2.0
"""Fetch models and media from URLs, object stores and the Hugging Face Hub, as verified local files.

No other package fetches URLs.
"""
