"""What is left of a trial: what is done and what is planned make up all that was decided, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.units import Begun, Chain, Unit
from dagsel.driver.recovery import Continuation, reconcile
from dagsel.history.tally import EpochTally
from dagsel.history.trial import EpochRecord, TrialRecord
from dagsel.messages import StoredState, UnitRecord

N = 3
ORDERS = {1: (2, 0, 1), 2: (1, 2, 0), 3: (0, 1, 2)}


def state(done: int) -> StoredState | None:
    """Say what is stored after so many units."""
    if not done:
        return None
    epoch, position = divmod(done - 1, N)
    visits = ORDERS[epoch + 1][: position + 1]
    return StoredState(epoch + 1, position, visits[-1], visits, 5, 0.5, digest=f"{epoch + 1}")


def recorded(heard: int, n_reported: int, n_decided: int, n_scored: int) -> TrialRecord:
    """Make the record of a trial of which so many training units were heard."""
    epochs = [EpochRecord(epoch, 0.5, {}, 0.5, 1.0) for epoch in range(1, n_reported + 1)]
    trial = TrialRecord(0, {}, {}, epochs=epochs, n_decided=n_decided)
    for done in range(n_reported * N + 1, heard + 1):
        report = state(done)
        assert report is not None
        tally = trial.tallies.setdefault(report.epoch, EpochTally(N))
        tally.update(report.position, report)
    if heard // N > n_reported:  # its last unit is done, so it may have been scored
        for shard in range(n_scored):
            unit = Unit("evaluate", 0, n_reported + 1, shard)
            score = UnitRecord(unit, "w", shard, 0.0, 1.0, False, n_samples=1, metrics={})
            trial.tallies[n_reported + 1].add(score)
    return trial


@given(
    n_reported=st.integers(0, 2),
    more=st.integers(0, N),
    stored=st.integers(0, 3 * N),
    n_scored=st.integers(0, N - 1),
)
def test_the_plan_is_what_the_store_and_the_scores_lack(
    n_reported: int, more: int, stored: int, n_scored: int
) -> None:
    heard = n_reported * N + more
    trial = recorded(heard, n_reported, 3, n_scored)
    newest = state(stored)
    ends = [state(epoch * N) for epoch in range(n_reported + 1, (stored - 1) // N + 1)]
    states = [found for found in (*ends, newest) if found is not None]
    trial.follow(states, N)
    plan = reconcile(trial, N, newest)
    assert plan is not None
    chain = Chain(0, plan.epochs, N, order=None, begun=plan.begun) if plan.epochs else None
    planned = [] if chain is None else list(chain.units)
    places = [(epoch, position) for epoch in range(1, 4) for position in range(N)]
    assert [(unit.epoch, unit.position) for unit in planned] == places[stored:]
    for index, epoch in enumerate(plan.epochs):
        begun = plan.begun[index] if index < len(plan.begun) else Begun()
        n_trained = min(max(stored - (epoch - 1) * N, 0), N)
        assert begun.visits == ORDERS[epoch][:n_trained]
        assert chain is not None
        left = [unit.position for unit in chain.evaluations(epoch)]
        if epoch <= n_reported:
            assert left == []
        elif epoch == n_reported + 1 and heard // N > n_reported:
            assert left == list(range(n_scored, N))
        else:
            assert left == list(range(N))
    for epoch, tally in trial.tallies.items():
        assert epoch > n_reported
        if len(tally.trained) == N:
            assert tally.digest == f"{epoch}"


def test_a_trial_that_has_nothing_left_has_no_epochs_to_train() -> None:
    trial = recorded(N, 1, 1, 0)
    plan = reconcile(trial, N, state(N))
    assert plan == Continuation(0, range(2, 2))


def test_a_paused_trial_that_lost_its_last_state_trains_that_unit_again() -> None:
    trial = recorded(2 * N, 2, 2, 0)
    plan = reconcile(trial, N, state(2 * N - 1))
    everything = frozenset(range(N))
    assert plan == Continuation(0, range(2, 3), (Begun(ORDERS[2][:2], everything),))
    earlier = reconcile(trial, N, state(N - 1))
    assert earlier is not None
    assert earlier.begun == (Begun(ORDERS[1][:2], everything), Begun((), everything))


def test_a_trial_that_lost_all_its_states_is_trained_again_unless_they_were_anothers() -> None:
    trial = recorded(2 * N, 2, 3, 0)
    everything = frozenset(range(N))
    plan = reconcile(trial, N, None)
    assert plan == Continuation(0, range(1, 4), (Begun((), everything),) * 2)
    trial.adopt(TrialRecord(1, {}, {}, epochs=trial.epochs[:1]), {})
    assert reconcile(trial, N, None) is None


def test_of_an_epoch_that_is_over_and_was_not_heard_of_all_shards_are_visited() -> None:
    trial = recorded(1, 0, 3, 0)
    trial.follow([state(N + 1)], N)  # type: ignore[list-item]
    plan = reconcile(trial, N, state(N + 1))
    assert plan is not None
    assert plan.begun[0].visits[0] == ORDERS[1][0]
    assert sorted(plan.begun[0].visits) == list(range(N))
    assert plan.begun[1].visits == ORDERS[2][:1]
