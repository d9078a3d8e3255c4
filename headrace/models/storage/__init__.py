# SPDX-License-Identifier: Apache-2.0
"""Artefacts and media from elsewhere, as verified local files. The only room that fetches a URL."""
