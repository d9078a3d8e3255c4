# SPDX-License-Identifier: Apache-2.0
"""The platform `local-docker`: a service is a container of a Docker engine, here or behind DOCKER_HOST."""
