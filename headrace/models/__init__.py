# SPDX-License-Identifier: Apache-2.0
"""What a model is before it runs: its configuration, its files and the media in its requests.

`config` reads and checks `config.pbtxt`, `storage` fetches models and media from elsewhere, `media` decodes images and
videos, `staging` makes a model repository of a model that is served straight from a path. Nothing here computes.
"""
