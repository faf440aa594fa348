"""The folder of a run.

- `run_dir`: the folder; `lock`: one driver at a time.
- `journal`: the entries of a run; `checkpoints`: the states of trials.
"""
