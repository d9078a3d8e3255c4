# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend: TorchScript, exported programs, and AOTInductor packages.

`backend` is the entry point. `archive` detects the kind of a file without running any of it; `torchscript`,
`exported_program` and `aot_inductor` check and load the three kinds as a `model_function`; `instance` runs it;
`settings` parses the parameters.
"""

from headrace.backends import torch_import

__all__ = ["torch_import"]
