"""What the dispatcher is told once, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """What the dispatcher is told once.

    Parameters
    ----------
    n_shards
        Number of training shards, and of validation shards.
    replicas
        Copies of each shard, on distinct workers.
    max_strikes
        So many workers may be lost, or time limits be passed, while a unit runs before its trial
        fails; up to twice as many where other units are struck too.
    max_failures
        So many exceptions of a unit fail its trial.
    unit_timeout_s
        Time limit of a unit; None for none.
    grace_s
        So long after it was told to stop a unit past its limit has its worker restarted.
    lookahead_s
        At most so long before its running unit is expected to end a worker may get its next one.
    overhead_s
        What it costs to tell a worker of a unit; long units are not bound ahead when that would
        move a state that may stay.
    capacity_timeout_s
        So long a shard may be without a place before the run fails, and a gang without workers
        enough before its trial does.
    rebalance
        Whether shards follow the workers' measured speeds; if not, each worker gets as many as
        the others.
    shard_weights
        Relative work of each shard; equal by default.
    """

    n_shards: int
    replicas: int = 1
    max_strikes: int = 3
    max_failures: int = 1
    unit_timeout_s: float | None = None
    grace_s: float = 10.0
    lookahead_s: float = 0.1
    overhead_s: float = 0.003
    capacity_timeout_s: float = 60.0
    rebalance: bool = True
    shard_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("n_shards", "replicas", "max_strikes", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.shard_weights is not None and len(self.shard_weights) != self.n_shards:
            raise ValueError(
                f"{len(self.shard_weights)} shard_weights were given for {self.n_shards} shards"
            )


@dataclass(slots=True)
class DispatchCounts:
    """Counts of what the dispatcher has done.

    Attributes
    ----------
    bound, looked_ahead
        Units bound, and those of them bound behind a running one.
    hops, stays
        Training units whose trial's state had to move, and those whose state was there.
    evaluation_hops
        Evaluating units to which the state had to move.
    """

    bound: int = 0
    looked_ahead: int = 0
    hops: int = 0
    stays: int = 0
    evaluation_hops: int = 0
