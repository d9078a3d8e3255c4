# SPDX-License-Identifier: Apache-2.0
"""Models of PyTorch: TorchScript, exported programs, and packages compiled ahead of time by AOTInductor.

`backend` is what the engine calls. The rest is its own: `archive` tells what a file is without running any of it,
`script` and `program` open the two kinds that are data, `script_check` and `program_check` look through those before
PyTorch sees them, `compiled` opens the third kind, which is native code, `calls` is what all three become, `naming` finds
a configuration's names in a model, `instance` computes, `settings` reads the parameters.
"""

from headrace.backends import torch_on_one_thread

__all__ = ["torch_on_one_thread"]
