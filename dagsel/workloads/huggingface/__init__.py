"""Training of models of Hugging Face: `HFWorkload`. Needs ``pip install "dagsel[transformers]"``.

- `workload`: the workload, a `dagsel.TorchWorkload` that knows what these models are called with.
- `models`: what is asked of a model, its files, and several as one; `columns`: whether the columns
  of a data set are what it is called with.
- `collating`: rows of unequal length as tensors, filled up or packed.
- `passes`: a batch's way through a model: inputs, labels, the loss and how much it counts.
"""

from dagsel.workloads.huggingface.workload import HFWorkload

__all__ = ["HFWorkload"]

HFWorkload.__module__ = __name__  # the public path, which run directories name
