"""How each example is called where it must be quick, and at night; needs nothing but Python.

The check of a release runs the small forms against the wheel.
"""

from __future__ import annotations

#: A file, and the options of its small form: a few seconds on two busy cores.
SMALL: dict[str, list[str]] = {
    "cluster_and_resume.py": ["--workers=1", "--trials=4", "--epochs=3"],
    "csv_table.py": ["--rows=3000", "--trials=3", "--epochs=9"],
    "digits.py": [],
    "gateway.py": ["--local", "--workers=1", "--epochs=10", "--budget=30 worker-s"],
    "hermes.py": ["--trials=4", "--epochs=4", "--quantum=2 s", "--goal=0.8"],
    "image_folder.py": ["--pictures=60", "--trials=3", "--epochs=6"],
    "lightning_cnn.py": ["--trials=3", "--epochs=3"],
    "lora.py": ["--task=classify", "--trials=2", "--epochs=1", "--sentences=60", "--steps=3"],
    "marble_queue.py": ["--given", "--samples=1500"],
    "mnist_cnn.py": ["--trials=2", "--epochs=3", "--shards=2"],
    "multi_objective.py": ["--trials=6", "--epochs=3"],
    "own_flow.py": ["--trials=4", "--epochs=3"],
    "own_workload.py": ["--trials=4", "--epochs=3"],
    "pbt.py": ["--population=4", "--epochs=4"],
    "seer.py": ["--deadline=60 s", "--budget=30 worker-s", "--samples=1500", "--epochs=20"],
    "sklearn_sgd.py": ["--trials=6", "--epochs=2"],
    "text.py": ["--reviews=800", "--trials=3", "--epochs=3"],
}
#: Forms that take longer: what somebody gets who names no option, and the other ones of some.
LARGE: dict[str, list[list[str]]] = {
    **{name: [[]] for name in SMALL},
    "gateway.py": [["--local"]],
    "lora.py": [
        [*SMALL["lora.py"], "--task=generate"],
        [*SMALL["lora.py"], "--flow=seer", "--deadline=60s", "--budget=100worker-s"],
        [],
    ],
    "marble_queue.py": [[], ["--given"]],
}
