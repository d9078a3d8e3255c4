# SPDX-License-Identifier: Apache-2.0
"""Save a PyTorch model so that it can be served without its code: the three lines at the end."""

from pathlib import Path

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3), torch.nn.Softmax(dim=-1))
Path("build").mkdir(exist_ok=True)

rows = {0: torch.export.Dim("rows", min=1, max=64)}
program = torch.export.export(model.eval(), (torch.zeros(2, 4),), dynamic_shapes=(rows,))
torch.export.save(program, "build/flowers.pt2")
