"""PyTorch's compiler is imported when something is compiled, and not before.

Each program is a process of its own: here the compiler may be imported already.
"""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import sys
import numpy as np
import torch
import dagsel
from dagsel.workloads import Visit

workload = dagsel.TorchWorkload(
    lambda config: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, torch.optim.Adam,
    batch_size=8, lr_scheduler=lambda it, config: torch.optim.lr_scheduler.StepLR(it, 1))
workload.validate({"lr": 0.1})
x = np.arange(64, dtype="float32").reshape(16, 4)
shard = workload.prepare({"x": x, "y": (x[:, 0] > 30).astype("int64")})

def train():
    state = workload.init({"lr": 0.1}, 0)
    return workload.train(state, shard, {"lr": 0.1}, visit=Visit(0, 0, 1, 0)).state

def is_there():
    return "torch._dynamo.config" in sys.modules
"""


def said(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def test_to_check_and_to_train_a_workload_does_not_import_it() -> None:
    assert said("train(); print(is_there())") == ["False"]


def test_to_train_in_a_gang_does_not_import_it() -> None:
    """It took seconds on each worker, often the last ones of a search with a deadline."""
    program = """
import torch.distributed as dist

train()
group, gloo = dist.ProcessGroup(dist.HashStore(), 0, 1), dist.ProcessGroup.BackendType.GLOO
group._set_default_backend(gloo)  # as a gang's: PyTorch's own way imports the compiler
backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
group._register_backend(torch.device("cpu"), gloo, backend)
alone = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(4, 2), process_group=group, init_sync=False)
alone(torch.ones(3, 4)).sum().backward()
print(is_there(), torch._dynamo.utils.get_optimize_ddp_mode())
utils = torch._dynamo.utils
print(utils.istype(1, int), is_there())
torch._dynamo.config.optimize_ddp = False
print(utils.get_optimize_ddp_mode(), torch._dynamo.utils.get_optimize_ddp_mode())
"""
    told = ["False", "ddp_optimizer", "True", "True", "no_optimization", "no_optimization"]
    assert said(program) == told


def test_it_comes_when_something_is_compiled_and_is_told_all_it_was_not_told() -> None:
    program = """
plain = train()
told = torch.optim.Optimizer.zero_grad.__wrapped__
import torch._dynamo as before
compiled = torch.compile(torch.nn.Linear(4, 2), backend="eager")
print(compiled(torch.ones(3, 4)).shape[0], is_there(), train() == plain)
print(torch._dynamo is sys.modules["torch._dynamo"], before.config is torch._dynamo.config)
optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

@torch.compile(backend="eager")
def step():
    optimizer.zero_grad()
    compiled(torch.ones(3, 4)).sum().backward()
    optimizer.step()

before = [p.detach().clone() for p in compiled.parameters()]
step()
print(any(not torch.equal(a, b) for a, b in zip(before, compiled.parameters())))
print(told.__dict__["__dynamo_disable"] is not told)
"""
    assert said(program) == ["3", "True", "True", "True", "True", "True", "True"]


def test_what_a_program_says_to_it_by_name_is_heard() -> None:
    program = """
import torch._dynamo

@torch._dynamo.disable
def alone(x):
    return x + 1

print(is_there(), float(alone(torch.zeros(()))))
from torch._dynamo import config
print(config is torch._dynamo.config)
"""
    assert said(program) == ["True", "1.0", "True"]


def test_who_looks_through_all_modules_does_not_import_it() -> None:
    program = """
import inspect, warnings
train()
for module in list(sys.modules.values()):
    getattr(module, "__file__", None), getattr(module, "__warningregistry__", None)
inspect.getmodule(train)
print(is_there())
"""
    assert said(program) == ["False"]
