"""What was compiled before fxremat was imported sees the plans that are made later."""

import subprocess
import sys

PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
x = torch.randn(3, 4)
loss = torch.compile(lambda x: model(x).sum(), backend="aot_eager")
loss(x).backward()

import fxremat

fxremat.optimize(model, "1MiB", costs="uniform", cache_dir=False)
loss(x).backward()
print(fxremat.report(model).differentiated)
"""


def test_a_function_compiled_before_the_import_runs_the_plan() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "True", run.stderr
