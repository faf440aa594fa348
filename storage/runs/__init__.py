"""The folder of a run.

- `run_dir`: the folder; `lock`: one driver at a time.
- `journal`: what happened, entry by entry; `checkpoints`: the states of trials.
"""
