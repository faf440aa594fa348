"""A node on paper: jobs that train at the speed λ of their gang, from one event to the next.

It shares no code with the engine nor with the simulator, which is checked against it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagsel.flow import Ask, Asked, Context, Finish, Flow, Reported, Stop, Tick, Train, Wake
from dagsel.planning.scaling import ScalingModel


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of time in which a job keeps its gang."""

    job: int
    begin_s: float
    end_s: float
    gang: int


@dataclass(slots=True)
class Training:
    gang: int
    since_s: float
    resumes_s: float  # until then it is being suspended and resumed
    left: int  # epochs, with the one that it is in
    part: float = 1.0  # of which this is left when it resumes


@dataclass
class Node:
    """Runs a flow on jobs that say ``architecture``, ``epochs`` and ``epoch_s`` on one worker."""

    jobs: Sequence[Mapping[str, float | str]]
    scaling: Mapping[str, ScalingModel]
    n_workers: int
    switch_s: float = 0.0
    now_s: float = 0.0
    wake_s: float = math.inf
    n_drawn: int = 0
    training: dict[int, Training] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def run(self, flow: Flow) -> float:
        """Give the time at which all jobs are done."""
        flow = copy.deepcopy(flow)
        decisions = flow.start(Context(self.n_workers))
        while Finish() not in decisions:
            asked = [self.draw(decision.n) for decision in decisions if isinstance(decision, Ask)]
            for decision in decisions:
                match decision:
                    case Train(job, epochs, gang=gang):
                        self.train(job, epochs, gang)
                    case Stop(job):
                        assert job not in self.training, "a job was stopped before its end"
                    case Wake(seconds):
                        self.wake_s = seconds
            assert sum(job.gang for job in self.training.values()) <= self.n_workers
            decisions = flow.handle(asked[0] if asked else self.happen())
        assert self.n_drawn == len(self.jobs)
        return self.now_s

    def draw(self, n: int) -> Asked:
        drawn = range(self.n_drawn, min(self.n_drawn + n, len(self.jobs)))
        self.n_drawn = drawn.stop
        return Asked(tuple(drawn), drawn.stop == len(self.jobs), tuple(self.jobs[j] for j in drawn))

    def train(self, job: int, epochs: int, gang: int) -> None:
        before = self.training.get(job)
        if before is None:
            self.training[job] = Training(gang, self.now_s, self.now_s, epochs)
            return
        self.pieces.append(Piece(job, before.since_s, self.now_s, before.gang))
        trained = max(0.0, self.now_s - before.resumes_s) / self.epoch_s(job)
        left, part = before.left + epochs, max(0.0, before.part - trained)
        self.training[job] = Training(gang, self.now_s, self.now_s + self.switch_s, left, part)

    def epoch_s(self, job: int) -> float:
        about = self.jobs[job]
        speed = self.scaling[str(about["architecture"])].speedup(self.training[job].gang)
        return float(about["epoch_s"]) / speed

    def ends_s(self, job: int) -> float:
        return self.training[job].resumes_s + self.training[job].part * self.epoch_s(job)

    def happen(self) -> Reported | Tick:
        job = min(self.training, key=self.ends_s)
        if self.wake_s < self.ends_s(job):
            self.now_s, self.wake_s = self.wake_s, math.inf
            return Tick(self.now_s)
        self.now_s, it = self.ends_s(job), self.training[job]
        it.left, it.part, it.resumes_s = it.left - 1, 1.0, self.now_s
        epoch = int(self.jobs[job]["epochs"]) - it.left
        if not it.left:
            self.pieces.append(Piece(job, it.since_s, self.now_s, it.gang))
            del self.training[job]
        return Reported(job, epoch, 1.0 / epoch, {}, self.now_s)
