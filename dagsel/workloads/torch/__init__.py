"""Training of PyTorch modules: `TorchWorkload`, and the parts that it is made of.

- `workload`: the workload; `build`: what its functions make of a configuration.
- `loop`: the training loop; `speed`: compiled modules and CUDA graphs; `device`: data on GPUs.
- `trials`: module and optimizer of a state; `live`: those that are still here from the unit before,
  and `outline`: what shows that they are the same.
- `pretrained`: models of which trials train a part or an addition; `frozen`: what is in no state.
- `state`: module, optimizer and random streams as one buffer; `reconfigure`: for another
  configuration.
- `ddp`: one batch on several workers; `compiler`: what PyTorch imports when something is compiled.
"""

from dagsel.workloads.torch.compiler import defer
from dagsel.workloads.torch.pretrained import Base
from dagsel.workloads.torch.workload import TorchWorkload

__all__ = ["Base", "TorchWorkload"]

TorchWorkload.__module__ = __name__  # the public path, which run directories name

defer()
