"""Several workers that train one unit together.

- `gang`: what a workload sees of them; `rendezvous`: how they find each other; `process_group`:
  their connections, with `torch.distributed`.
"""
