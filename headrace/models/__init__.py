# SPDX-License-Identifier: Apache-2.0
"""Models before they run: configuration, files, and the media in requests.

`config` reads and checks `config.pbtxt`, `storage` fetches models and media from elsewhere, `media` decodes images and
videos, `staging` builds a model repository for a model that is served from a path. Nothing here runs a model.
"""
