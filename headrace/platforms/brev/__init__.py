# SPDX-License-Identifier: Apache-2.0
"""Services as containers on instances of NVIDIA Brev, through its command line. Knows no other platform."""
