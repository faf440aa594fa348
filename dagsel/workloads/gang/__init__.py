"""Several workers that train one unit together.

- `gang`: what a workload sees of it; `rendezvous`: how its members meet; `process_group`: the same
  on `torch.distributed`.
"""
