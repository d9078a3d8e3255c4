# SPDX-License-Identifier: Apache-2.0
"""Autoscaling: how many replicas a load needs. Pure: samples and time are passed in.

The local fleet and the router use it to scale replicas; who measures and who starts replicas is not decided here.
"""
