"""The trials: which shards each has visited, which it still has to, and which units are ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dagsel.dispatch.events import Worker
from dagsel.dispatch.units import Chain, Unit, units_after


@dataclass(slots=True)
class Epoch:
    """One epoch of a trial."""

    chain: Chain
    # By position; it stays if a result is lost: a unit that runs again visits the same shard.
    visited: list[int | None]
    left: int  # bit mask of the shards that no done unit has visited
    unscored: int  # bit mask of the validation shards that are not scored
    trained_on: Worker | None = None  # the worker that trained the newest unit


@dataclass(slots=True)
class Trial:
    """One trial's epochs, and which of its training units are ready or bound."""

    number: int
    epochs: dict[int, Epoch] = field(default_factory=dict)
    ready: list[Unit] = field(default_factory=list)  # in chain order; several if results were lost
    early: list[Unit] = field(default_factory=list)  # ready, but the one before it is not done
    active: Unit | None = None  # the training unit that is bound
    visiting: int = 0  # bit mask of the shards that it visits, and those after it in its task
    partial: dict[Unit, int] = field(default_factory=dict)  # shards of interrupted units
    open: dict[int, Epoch] = field(default_factory=dict)  # those with units that are not done

    @property
    def is_busy(self) -> bool:
        """Whether it has units that are not done, or that are ready to be done again."""
        return bool(self.open or self.ready)

    def add(self, chain: Chain) -> None:
        """Add a chain's epochs."""
        for epoch in chain.epochs:
            if epoch in self.epochs:
                raise ValueError(f"trial {self.number}: epoch {epoch} was added before")
        for epoch in chain.epochs:
            everything = (1 << chain.n_shards) - 1
            done = chain.done(epoch)
            visited = [*done.visits, *[None] * (chain.n_shards - len(done.visits))]
            left = everything & ~sum(1 << shard for shard in done.visits)
            unscored = sum(1 << unit.position for unit in chain.evaluations(epoch))
            if done.partial is not None:
                following = Unit("train", self.number, epoch, len(done.visits))
                self.partial[following] = done.partial
            self.epochs[epoch] = self.open[epoch] = Epoch(chain, visited, left, unscored)
            self.close(epoch)

    def note_ready(self, unit: Unit) -> None:
        """Note that a training unit is ready; it has its turn once the one before it is done.

        The first unit of a graph begins with a stored state, so that for the cluster it is ready at
        once, even if the trial still trains the units of an earlier graph.
        """
        units = self.ready if self._is_due(unit) else self.early
        if unit not in units:
            units.append(unit)
            units.sort()

    def note_done(self) -> None:
        """Let those have their turn that waited for a unit that is done now."""
        due = [unit for unit in self.early if self._is_due(unit)]
        self.early = [unit for unit in self.early if unit not in due]
        for unit in due:
            self.note_ready(unit)

    def _is_due(self, unit: Unit) -> bool:
        if unit.position:
            return self.epochs[unit.epoch].visited[unit.position - 1] is not None
        before = self.epochs.get(unit.epoch - 1)
        return before is None or before.visited[-1] is not None

    def recorded(self, unit: Unit) -> int | None:
        """Return the shard that the unit has visited or is partly through, if there is one."""
        shard = self.epochs[unit.epoch].visited[unit.position]
        return self.partial.get(unit) if shard is None else shard

    def is_repeat(self, unit: Unit) -> bool:
        """Whether the unit was done before and only its result is missing."""
        return self.epochs[unit.epoch].visited[unit.position] is not None

    def need(self, unit: Unit, *, besides: int = 0) -> int:
        """Return the bit mask of the shards that a training unit may be bound to.

        `besides` has the shards that the units before it are visiting right now.
        """
        epoch = self.epochs.get(unit.epoch)
        if epoch is None:
            return 0
        shard = self.recorded(unit)
        if shard is None:
            shard = epoch.chain.fixed_shard(unit)
        if shard is not None:
            return 1 << shard
        return epoch.left & ~besides

    def need_after(self, unit: Unit, *visits: int) -> int:
        """Return the bit mask of the shards that the trial may visit after a unit's task."""
        if self.ready:
            return self.need(self.ready[0])
        following = unit._replace(position=unit.position + len(visits))
        if following.position < self.epochs[unit.epoch].chain.n_shards:
            return self.need(following, besides=sum(1 << shard for shard in visits))
        return self.need(unit._replace(epoch=unit.epoch + 1, position=0))

    def visits_after(self, unit: Unit, shard: int, held: int) -> Iterator[int]:
        """Yield the shards that the epoch's next units may visit, in order, where these are held.

        Where the order is free the shards follow each other, so that trials which began with
        different ones do not meet.
        """
        visited = 1 << shard
        for following in units_after(unit, self.epochs[unit.epoch].chain.n_shards):
            mask = self.need(following, besides=visited) & held
            if self.recorded(following) is not None or not mask or self.ran_out(following):
                return
            mask = (mask >> shard << shard) or mask
            shard = (mask & -mask).bit_length() - 1
            visited |= 1 << shard
            yield shard

    def ran_out(self, unit: Unit) -> bool:
        """Whether a unit has run out of memory, so that it gets a task for itself alone."""
        return unit in self.epochs[unit.epoch].chain.ran_out

    def record(self, unit: Unit, shard: int) -> bool:
        """Note a visit; return False if another unit of the epoch has visited the shard."""
        epoch = self.epochs[unit.epoch]
        before = epoch.visited[unit.position]
        if before is not None:
            return before == shard
        if not epoch.left >> shard & 1:
            return False
        epoch.visited[unit.position] = shard
        epoch.left &= ~(1 << shard)
        return True

    def close(self, epoch: int) -> None:
        """Take the epoch off the open ones if all its units are done."""
        if epoch in self.open and not self.open[epoch].left | self.open[epoch].unscored:
            del self.open[epoch]


#: What is left of a trial's time when it is over: less than a batch takes.
SPENT_S = 1e-4


@dataclass(slots=True)
class Allowance:
    """How a trial may train."""

    gang: int = 1  # workers that train it together
    seconds_left: float | None = None  # None for no limit
    held: bool = False  # it has to rest
    number: int = 0  # the last one of `TrialAllowed` or `TrialHeld`


#: The allowance of a trial for which there was no event.
FREE = Allowance()


@dataclass(slots=True)
class Binding:
    """A unit on a worker."""

    unit: Unit
    worker: Worker
    shard: int
    seconds: float  # expected
    ahead_s: float  # so long before its end its worker may get another unit
    in_plenty: bool = False  # ... if there are enough other trials then
    began_s: float | None = None  # None: another unit runs there
    started: bool = False  # the worker said that it runs
    trains_s: float | None = None  # since when it trains or scores, as far as its worker has said
    stores: bool = False  # it has trained: its worker stores its state while another unit trains
    before: tuple[float, int] = (0.0, 0)  # seconds of workers, and lost workers, until then
    died: bool = False  # a worker was lost under it
    preempted_s: float | None = None  # when it was told to stop
    timed_out: bool = False  # it was told to stop because of its time limit
    members: tuple[Worker, ...] = ()  # the other workers of its gang
    then: tuple[int, ...] = ()  # shards that its trial visits next, in the same task
    scores: tuple[int, ...] = ()  # validation shards that are scored in it, too
    # members that have gone, even if a worker with such an address has joined again
    lost: tuple[Worker, ...] = ()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that it was bound to."""
        return (self.worker, *self.members)

    @property
    def visits(self) -> tuple[int, ...]:
        """The shards that its task visits, in order."""
        return (self.shard, *self.then)

    @property
    def shards(self) -> int:
        """Bit mask of the shards that it needs."""
        return sum(1 << shard for shard in {*self.visits, *self.scores})

    @property
    def there(self) -> tuple[Worker, ...]:
        """The workers that it is still on."""
        return (self.worker, *(member for member in self.members if member not in self.lost))
