"""The parts that a worker takes in gangs: those that it leads, and those to which it is called."""

from __future__ import annotations

import logging
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle
from distributed.comm.addressing import get_address_host

from dagsel.dispatch.units import Unit
from dagsel.execution.held_shards import HeldShards
from dagsel.execution.process import use_torch
from dagsel.execution.raising import Raising, process_stays
from dagsel.execution.run_spec import RunSpec
from dagsel.execution.visits import visit_of
from dagsel.messages import AbandonGang, Assignment, GangCalls, JoinGang, Notice
from dagsel.workloads.base import Workload, never
from dagsel.workloads.gang.gang import Gang, GangWorkload, join_gang, lead_gang
from dagsel.workloads.memory import with_halved
from dagsel.workloads.random_streams import own_streams

logger = logging.getLogger("dagsel")

_TOLD_TO_STOP = "told to stop"


class How(NamedTuple):
    """What a training unit gets beside state and shard."""

    config: Mapping[str, Any]  # its trial's
    value: float | None = None  # the metric of the epoch before, for `Visit.last_value`
    halvings: int = 0  # how often the samples are halved that it trains on at once


class GangParts:
    """Leads gangs of units on one worker, and joins those that others lead.

    The thread that hears the dispatcher calls it beside those that train.
    """

    def __init__(
        self,
        spec: RunSpec,
        workload: Workload,
        shards: HeldShards,
        address: str,
        tell: Callable[[Notice], None],
        raising: Raising,
    ) -> None:
        self._spec, self._workload, self._shards = spec, workload, shards
        self._address, self._tell, self._raising = address, tell, raising
        self._waits: dict[tuple[Unit, int], Callable[[str], None]] = {}  # end them, and say why
        self.joined: set[JoinGang] = set()  # those that others lead

    def workload(self, how: How) -> GangWorkload:
        """Return the workload that a unit's gang trains with."""
        workload = with_halved(self._workload, how.halvings)
        assert isinstance(workload, GangWorkload), "checked before the trial began"
        return workload

    @contextmanager
    def lead(
        self, unit: Unit, binding: Assignment, how: How, stop: threading.Event
    ) -> Iterator[Gang]:
        """Form a gang: the dispatcher calls the others here, and tells them how they train.

        Once `stop` is set nobody is called any more. Whoever sets it ends a wait by `abandon`.
        """
        attempt, packed = binding.attempt, b64encode(cloudpickle.dumps(how)).decode()

        def call(rank: int, port: int) -> None:
            if stop.is_set():  # before it could be ended
                self.abandon(unit, attempt)
            else:
                self._tell(GangCalls(unit, attempt, rank, port, packed))

        def waits(end: Callable[[str], None]) -> None:
            self._waits[unit, attempt] = end

        host = get_address_host(self._address)
        about = self._about(unit, attempt)
        try:
            with lead_gang(host, size=binding.gang, call=call, waits=waits, **about) as gang:
                yield gang
        finally:
            self._waits.pop((unit, attempt), None)

    def abandon(self, unit: Unit, attempt: int, reason: str = _TOLD_TO_STOP) -> None:
        """End the leader's wait for the others, if it waits."""
        if (end := self._waits.get((unit, attempt))) is not None:
            threading.Thread(target=end, args=(reason,), name="dagsel-gang", daemon=True).start()

    def abandon_all(self) -> None:
        """End the waits of all gangs that this worker leads."""
        for unit, attempt in list(self._waits):
            self.abandon(unit, attempt)

    def join(self, call: JoinGang, begin: Callable[[Callable[[], None]], object]) -> None:
        """Train in a gang that another worker leads, in the thread that `begin` gives it."""
        self.joined.add(call)
        begin(lambda: self._join(call))

    def _join(self, call: JoinGang) -> None:
        """Train in a gang that another worker leads. The leader is told what goes wrong."""
        unit, has_come = call.unit, False
        use_torch(self._spec.threads, self._spec.dtype)
        about = {**self._about(unit, call.attempt), "worker": self._raising.worker}
        try:
            self._raising.check_gpu()
            how: How = cloudpickle.loads(b64decode(call.how))
            with (
                own_streams(),
                self._shards.use(call.shard, "train") as shard,
                join_gang(call.host, call.port, rank=call.rank, size=call.size, **about) as gang,
                process_stays(),
            ):
                has_come = True
                self.workload(how).train_gang(
                    None,
                    shard,
                    how.config,
                    visit=visit_of(self._spec, unit, call.shard, how.value),
                    should_stop=never,
                    gang=gang,
                )
        except Exception as error:
            # The leader raises what is raised in the gang, and says what became of the unit.
            if not has_come:
                self._tell(AbandonGang(unit, call.attempt, f"{type(error).__name__}: {error}"))
            self._raising.relieve_of(error)
            logger.debug("rank %d of the gang of %s", call.rank, unit, exc_info=True)
        finally:
            self.joined.discard(call)

    def _about(self, unit: Unit, attempt: int) -> dict[str, Any]:
        name = f"{unit.trial}-{unit.epoch}-{unit.position}-{attempt}"
        timeout_s, secret = self._spec.gang_timeout_s, self._spec.secret
        return {"name": name, "timeout_s": timeout_s, "secret": secret}
