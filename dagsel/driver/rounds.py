"""Which epochs are sent when: rounds of what trials are to train.

Epochs are sent as they are decided, all of a decision as one chain; of a million that nobody will
ever train, a thousand at a time. But training that follows the metric of the search begins an epoch
with that of the one before. So such a trial's epochs are sent one by one, each when the one before
it was reported; the journal has the metric, so a later session sends the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dagsel.dispatch.units import Round
from dagsel.driver.protocols import Engine
from dagsel.driver.recovery import Continuation, Orders
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import Entry, RoundSent

#: Epochs of a trial that are sent at once; the next ones follow when half of them are reported.
MOST_EPOCHS = 1_000


@dataclass(slots=True)
class Rounds:
    """What is sent of a run's epochs."""

    engine: Engine  # where they are trained
    record: Record  # what has happened
    note: Callable[[Entry], None]  # writes to the journal
    orders: Orders  # returns the orders of visits
    follows_metric: Callable[[Any], bool]  # whether training with a configuration does
    # The metrics that it follows, by epoch, where they are not the run's own.
    foreseen: Sequence[float] | None = None
    # Bytes that a unit takes, as far as it is known, if its samples are halved so often.
    needs: Callable[[Any, int], int | None] = lambda config, halvings: None
    # By trial that is not sent whole: its last epoch that is.
    _sent: dict[int, int] = field(default_factory=dict)
    _follow: dict[int, tuple[object, bool]] = field(default_factory=dict)  # by trial, for a config
    # By trial: what its units take, with a configuration and so many halvings.
    _needs: dict[int, tuple[object, int, int | None]] = field(default_factory=dict)
    # By trial whose last state is made anew: what waits for it.
    _repairs: dict[int, list[Continuation]] = field(default_factory=dict)

    def more(self, trial: TrialRecord, n_epochs: int) -> Continuation:
        """Return what can be sent of the epochs that were just decided, and of earlier ones."""
        if self._waits(trial) or trial.number in self._sent:
            return self.due(trial)
        last = trial.n_decided
        epochs = range(last - n_epochs + 1, last + 1)
        return Continuation(trial.number, self._first(trial.number, epochs))

    def due(self, trial: TrialRecord) -> Continuation:
        """Return the epochs of a trial that have waited for what was just reported, if any."""
        n_reported, following = len(trial.epochs), range(0)
        has_more = trial.is_live and trial.n_decided > n_reported
        if has_more and self._waits(trial):
            if self._sent.get(trial.number, 0) <= n_reported:
                following = range(n_reported + 1, n_reported + 2)
                self._sent[trial.number] = n_reported + 1
        elif has_more and trial.number in self._sent:
            sent = self._sent[trial.number]
            if sent - n_reported <= MOST_EPOCHS // 2:
                following = range(sent + 1, trial.n_decided + 1)[:MOST_EPOCHS]
                self._sent[trial.number] = sent + len(following)
        return Continuation(trial.number, following)

    def _first(self, trial: int, epochs: range) -> range:
        """Return the first epochs of those that may be sent; the others wait."""
        if len(epochs) > MOST_EPOCHS or trial in self._sent:
            epochs = epochs[:MOST_EPOCHS]
            self._sent[trial] = epochs[-1]
        return epochs

    def anew(self, plan: Continuation) -> Continuation:
        """Return what can be sent of a plan for a trial of which nothing is under way."""
        trial = self.record.trials[plan.trial]
        self._repairs.pop(plan.trial, None)
        if trial.is_paused and plan.epochs:  # its last state is damaged, and made anew
            self._repairs[plan.trial] = []
        if not plan.epochs:
            return plan
        if not self._waits(trial):
            return replace(plan, epochs=self._first(plan.trial, plan.epochs))
        # Of what begins after the epoch that follows the reported ones the metric is not known.
        ready = range(plan.epochs.start, min(plan.epochs.stop, len(trial.epochs) + 2))
        self._sent[plan.trial] = ready[-1]
        return replace(plan, epochs=ready)

    def send(self, plans: Iterable[Continuation]) -> None:
        """Send what there is; what follows on a state that is made anew waits for that."""
        chains = []
        for plan in plans:
            trial = self.record.trials[plan.trial]
            if plan.epochs.start > len(trial.epochs) and plan.trial in self._repairs:
                self._repairs[plan.trial].append(plan)
            elif plan.epochs:
                is_told = self.foreseen is not None or self._follows(trial)
                values = self._values(trial, plan.epochs) if is_told else ()
                chain = plan.chain(self.record, self.orders, values)
                chains.append(replace(chain, memory_bytes=self._need(trial)))
        if not chains:
            return
        number = len(self.record.rounds) + 1
        epochs = tuple((chain.trial, chain.epochs.start, chain.epochs.stop) for chain in chains)
        self.note(RoundSent(number, self.engine.wall(), epochs))
        configs = {chain.trial: self.record.trials[chain.trial].config for chain in chains}
        self.engine.submit(Round(number, tuple(chains)), configs)

    def repairs(self, trial: int) -> bool:
        """Whether a trial's last state is to be made anew."""
        return trial in self._repairs

    def repaired(self, trial: TrialRecord) -> None:
        """Send what has waited for a trial's last state, if that was to be made anew."""
        if trial.number in self._repairs:
            self.engine.release(trial.number, len(trial.epochs))
            for plan in self._repairs.pop(trial.number):
                self.send([plan])

    def forget(self, trial: int) -> None:
        """Forget a trial that has ended."""
        for by_trial in (self._repairs, self._sent, self._follow, self._needs):
            by_trial.pop(trial, None)

    def _waits(self, trial: TrialRecord) -> bool:
        return self.foreseen is None and self._follows(trial)

    def _follows(self, trial: TrialRecord) -> bool:
        config, follows = self._follow.get(trial.number, (None, False))
        if config is not trial.config:
            try:
                follows = self.follows_metric(trial.config)
            except Exception:  # noqa: BLE001 - the user's own code; its unit will raise it too
                follows = True
            self._follow[trial.number] = (trial.config, follows)
        return follows

    def _need(self, trial: TrialRecord) -> int | None:
        halvings = sum(told.unit.kind == "train" for told in trial.ran_out)
        config, n, need = self._needs.get(trial.number, (None, 0, None))
        if config is not trial.config or n != halvings:
            try:
                need = self.needs(trial.config, halvings)
            except Exception:  # noqa: BLE001 - the user's own code; the check has called it, too
                need = None
            self._needs[trial.number] = (trial.config, halvings, need)
        return need

    def _values(self, trial: TrialRecord, epochs: range) -> tuple[float | None, ...]:
        if self.foreseen is None:
            return tuple(map(trial.value_before, epochs))
        known = dict(enumerate(self.foreseen, start=2))
        return tuple(map(known.get, epochs))
