"""Small faults that no test saw once: the table of `known.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """One text in place of another in a file of dagsel, and the tests that see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str  # what pytest is called with

    def put_in(self, copy: Path) -> None:
        """Put the fault into a copy of the code."""
        path = copy / "dagsel" / self.file
        code = path.read_text()
        if code.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.right!r} not exactly once")
        path.write_text(code.replace(self.right, self.wrong))


FAULTS = (
    Fault(
        "asha: a failed paused trial stays promotable",
        "flows/asynchronous_halving.py",
        "record.paused = [result for result in record.paused if result[1] != trial]",
        "record.paused = list(record.paused)",
        "flows/test_asha.py",
    ),
    Fault(
        "hyperband: rounding is ignored in the sizes of rungs",
        "flows/hyperband.py",
        "self.min_epochs, self.max_epochs, self.reduction_factor, self.rounding\n",
        "self.min_epochs, self.max_epochs, self.reduction_factor\n",
        "flows/test_hyperband.py",
    ),
    Fault(
        "hyperband: rounding is ignored when a rung is halved",
        "flows/hyperband.py",
        "SynchronousBrackets(self.reduction_factor, self.rounding, self.n_concurrent)",
        'SynchronousBrackets(self.reduction_factor, "floor", self.n_concurrent)',
        "flows/test_hyperband.py",
    ),
    Fault(
        "successive halving: a failed trial stays in the results of its rung",
        "flows/successive_halving.py",
        "bracket.results = [result for result in bracket.results if result[1] != trial]",
        "bracket.results = list(bracket.results)",
        "flows/test_successive_halving.py",
    ),
    Fault(
        "pbt: of equal members the one with the higher number is the better one",
        "flows/pbt.py",
        "key=lambda trial: (state.losses[trial], trial)",
        "key=lambda trial: (state.losses[trial], -trial)",
        "flows/test_pbt.py",
    ),
    Fault(
        "pbt: factors are ignored",
        "flows/pbt.py",
        "factor = self.factors[int(rng.integers(len(self.factors)))]",
        "factor = (1.2, 0.8)[int(rng.integers(2))]",
        "flows/test_pbt.py",
    ),
    Fault(
        "seer: parallelism_factor is ignored",
        "flows/seer.py",
        "            reduction_factor=self.reduction_factor,\n"
        "            parallelism_factor=self.parallelism_factor,\n"
        "            min_workers_per_trial=self.min_workers_per_trial,\n"
        "            max_workers_per_trial=self.max_workers_per_trial,\n            min_stage",
        "            reduction_factor=self.reduction_factor,\n"
        "            parallelism_factor=2,\n"
        "            min_workers_per_trial=self.min_workers_per_trial,\n"
        "            max_workers_per_trial=self.max_workers_per_trial,\n            min_stage",
        "flows/test_seer.py",
    ),
    Fault(
        "brackets: a bound on the workers is ignored",
        "planning/brackets.py",
        "if self.most_workers is not None and needed > self.most_workers:",
        "if self.most_workers is not None and needed < 0:",
        "planning/test_brackets.py",
    ),
    Fault(
        "capacity: a worker is asked for that comes too late",
        "planning/capacity.py",
        "paid = 0 if is_late else int(",
        "paid = int(",
        "planning/test_capacity.py",
    ),
    Fault(
        "stages: what the start has taken is forgotten",
        "flows/stages.py",
        "left_s = self.deadline_s - context.seconds",
        "left_s = self.deadline_s",
        "flows/test_seer.py",
    ),
    Fault(
        "stages: the warming up counts as training",
        "flows/stages.py",
        "(state.paused_at - since[1]) / (trained - since[0])",
        "state.paused_at / trained",
        "flows/test_seer.py",
    ),
    Fault(
        "first epoch: nothing is too late",
        "driver/first_epoch.py",
        "self._cold_least_s) <= clock.left_s:",
        "self._cold_least_s) <= math.inf:",
        "driver/test_first_epoch.py",
    ),
    Fault(
        "marble: a job is promoted at equal cost",
        "flows/marble.py",
        "job.won_s(gang, more) > cost_s",
        "job.won_s(gang, more) >= cost_s",
        "flows/test_marble.py",
    ),
    Fault(
        "marble: an architecture's first switches count for ever",
        "flows/allocation.py",
        "known[-N_SWITCHES:]",
        "known[:N_SWITCHES]",
        "flows/test_allocation.py",
    ),
    Fault(
        "allocation: where workers were lost, the first jobs lose them first",
        "flows/allocation.py",
        "    for job in reversed(jobs):\n        given",
        "    for job in jobs:\n        given",
        "flows/test_allocation.py",
    ),
    Fault(
        "rule: no bonus for a state that is here",
        "dispatch/list_scheduler.py",
        "self._key[first][1] * (1.0 - self.stay)",
        "self._key[first][1]",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: no bonus for a state that is here, where shards have several holders",
        "dispatch/list_scheduler.py",
        "score += self.stay",
        "score += 0.0",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: a state that is here counts before a priority",
        "dispatch/list_scheduler.py",
        "if first is None or self._key[first][0] < best[0]:",
        "if first is None:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: what it costs to wait is not counted",
        "dispatch/list_scheduler.py",
        "if limit > slack or self.target - self.rem[first] < limit:",
        "if False:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: a worker that is late itself waits",
        "dispatch/list_scheduler.py",
        "if limit > slack or self.target - self.rem[first] < limit:",
        "if self.target - self.rem[first] < limit:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: no priority where shards have several holders",
        "dispatch/list_scheduler.py",
        "ranked.append((-rank, -score - part, trial, shard))",
        "ranked.append((0.0, -score - part, trial, shard))",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "rule: waits for trials of less priority",
        "dispatch/list_scheduler.py",
        "or self.priority.get(trial, 0.0) < priority:",
        "or False:",
        "dispatch/test_list_scheduler.py",
    ),
    Fault(
        "brackets: a budget that just pays for one more full bracket does not",
        "planning/brackets.py",
        "while (q + 1) * nu**q <= B / B_0:",
        "while (q + 1) * nu**q < B / B_0:",
        "planning/test_brackets.py",
    ),
    Fault(
        "runner: a metric that is NaN is reported",
        "driver/scoring.py",
        "if math.isnan(metrics[name])]",
        "if metrics[name] is None]",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: a second Train of a turn replaces the first one's epochs",
        "driver/runner.py",
        "epochs += trains[trial].epochs if trial in trains else 0",
        "epochs += 0",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: an Ask is answered after the search finished",
        "driver/runner.py",
        "case Ask() | Add() if not self.record.finished:",
        "case Ask() | Add():",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: ends of epochs are never dropped",
        "driver/runner.py",
        "self._stored.drop_ends()",
        "pass",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: the flow hears of 0 workers",
        "driver/runner.py",
        "not in (0, self.record.n_workers)",
        "not in (self.record.n_workers,)",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: no snapshots of the flow",
        "driver/runner.py",
        "if self._n_turns - self._n_kept >= max(TURNS_PER_SNAPSHOT, self._n_kept // 2):",
        "if False:",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: the budget of earlier sessions is forgotten",
        "driver/clock.py",
        "self._cost_before = record.worker_seconds",
        "self._cost_before = 0.0",
        "driver/test_runner.py",
    ),
    Fault(
        "runner: what was decided is not written before it is done",
        "driver/runner.py",
        "        self.journal.append(self._entries)\n        self._entries = []\n        trains",
        "        self._entries = []\n        trains",
        "driver/test_runner.py",
    ),
    Fault(
        "session: a driver that has lost its lock writes on",
        "session.py",
        "self.lock.check()",
        "pass",
        "driver/test_runner.py",
    ),
    Fault(
        "trial: a unit keeps the share of a piece",
        "history/trial.py",
        "work.share if isinstance(work, PieceRecord) else 0.0",
        "work.share if isinstance(work, PieceRecord) else self.share",
        "history/test_trial.py",
    ),
    Fault(
        "record: a clone is worth what the state was that it lost",
        "history/record.py",
        "self._score(taker, self._end_of(taker), afresh=True)",
        "self._score(taker, self._end_of(taker))",
        "history/test_kept.py",
    ),
    Fault(
        "trial: recovered units count as timed",
        "history/trial.py",
        " and not work.recovered:",
        ":",
        "history/test_trial.py",
    ),
    Fault(
        "journal: a failed append keeps the end that it believed",
        "storage/runs/journal.py",
        "        self._end = None  # until it is known again\n",
        "",
        "storage/runs/test_journal.py",
    ),
    Fault(
        "checkpoints: records of checks go after their states",
        "storage/runs/checkpoints.py",
        "key=_records_first):\n            match = _CHECK",
        "key=None):\n            match = _CHECK",
        "storage/runs/test_checkpoint_crashes.py",
    ),
    Fault(
        "disk: the directory is not synced after a rename",
        "storage/disk.py",
        "    if sync:\n        _sync_directory(path.parent)\n\n\ndef create",
        "\n\ndef create",
        "storage/runs/test_crash.py::"
        "test_what_was_appended_claimed_or_saved_with_sync_survives_a_power_failure",
    ),
    Fault(
        "tidy: partial states stay",
        "session.py",
        "for partial in (False, True):",
        "for partial in (False,):",
        "driver/test_tidy.py",
    ),
    Fault(
        "tidy: states of other trials stay",
        "session.py",
        "{best.trial for best in record.top} - record.interrupted:",
        "record.trials.keys() - record.interrupted:",
        "driver/test_tidy.py",
    ),
    Fault(
        "tidy: copies of states that were scored stay",
        "session.py",
        "states.drop_checks(best.trial, but=best.check)",
        "pass",
        "driver/test_tidy.py",
    ),
    Fault(
        "runner: the engine does not hear of a priority",
        "driver/runner.py",
        "            self._limits.prioritize(trial.number, train.priority)\n",
        "",
        "driver/test_runner.py",
    ),
    Fault(
        "run: replicas are forgotten",
        "run.py",
        "replicas=given.replicas,",
        "",
        "driver/test_session.py",
    ),
    Fault(
        "run: the time limit of a unit is forgotten",
        "run.py",
        "unit_timeout_s=given.unit_timeout,",
        "",
        "driver/test_session.py",
    ),
    Fault(
        "session: the dispatcher does not hear of replicas",
        "session.py",
        '            None if self.settings.replicas == "auto" else self.settings.replicas,\n',
        "",
        "driver/test_session.py",
    ),
    Fault(
        "workers: copies take as much memory as the only ones may",
        "dispatch/workers.py",
        "host.most = host.copy_room if is_spare else host.max_shards",
        "host.most = host.max_shards",
        "dispatch/test_placement.py",
    ),
    Fault(
        "workers: all begin with the same shard",
        "dispatch/workers.py",
        "first = (host.number - 1) * n // len(self)",
        "first = 0",
        "dispatch/test_placement.py",
    ),
    Fault(
        "progress: showing takes what time it wants",
        "views/progress.py",
        "max(REFRESH_S, SPARING * min(before, self._cost_s))",
        "REFRESH_S",
        "views/test_progress.py",
    ),
    Fault(
        "a log tells again of trials that had ended before",
        "views/displays.py",
        "self._ended = set(ended)\n        self._due: float",
        "self._ended = set[int]()\n        self._due: float",
        "views/test_progress.py",
    ),
    Fault(
        "session: the dispatcher does not hear of the time limit of a unit",
        "session.py",
        "unit_timeout_s=self.settings.unit_timeout_s,",
        "",
        "driver/test_session.py",
    ),
    Fault(
        "worker: a later result is not looked for in the store",
        "execution/state_cache.py",
        "if latest is not None and latest > place:",
        "if False:",
        "workers/test_state_cache.py",
    ),
    Fault(
        "worker: a damaged end of an epoch is passed over for a later state",
        "execution/state_cache.py",
        "if damage is not None and unit.position == self._n_shards - 1:",
        "if False:",
        "workers/test_state_cache.py",
    ),
    Fault(
        "worker: pages of mapped shards are forgotten by nobody but units",
        "execution/mapped_pages.py",
        "            self._thread.start()\n",
        "            pass\n",
        "workers/test_held_shards.py::test_a_large_shard_is_forgotten_while_it_is_in_use",
    ),
    Fault(
        "worker: a dropped shard keeps its room in memory",
        "execution/held_shards.py",
        "        self._in_memory.discard(shard)\n\n",
        "\n",
        "workers/test_held_shards.py::test_auto_takes_memory_while_the_shards_fit_into_their_share",
    ),
    Fault(
        "cache: the file of another process is believed",
        "storage/shard_cache.py",
        "if shard not in self._own:",
        "if False:",
        "storage/test_shard_cache.py::test_a_damaged_file_is_found_and_fetched_anew",
    ),
    Fault(
        "cache: a folder in use is swept",
        "storage/shared_folder.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "storage/test_shard_cache.py::test_what_a_killed_run_has_left_is_removed_by_the_next",
    ),
    Fault(
        "worker: an epoch is scored by a later state",
        "execution/unit_runner.py",
        "if (stored.epoch, stored.position) != end:",
        "if False:",
        "workers/test_unit_runner.py",
    ),
    Fault(
        "worker: max_batches is one more",
        "execution/unit_runner.py",
        "self._batches_left <= 0",
        "self._batches_left < 0",
        "workers/test_unit_runner.py",
    ),
    Fault(
        "worker: a loser's state goes on beside the winner's report",
        "execution/unit_runner.py",
        "if kept.shard != binding.shard:",
        "if False:",
        "workers/test_unit_runner.py",
    ),
    Fault(
        "dispatcher: strikes are never cleared",
        "dispatch/dispatch_state.py",
        "        self.strikes.pop(unit, None)\n",
        "",
        "dispatch/test_strikes.py::test_strikes_from_before_a_unit_got_on_do_not_count",
    ),
    Fault(
        "dispatcher: what speaks against a unit is never cleared",
        "dispatch/dispatch_state.py",
        "        self.suspects.pop(unit, None)\n",
        "",
        "dispatch/test_strikes.py::test_progress_clears_a_unit",
    ),
    Fault(
        "dispatcher: a unit that is done keeps its strikes",
        "dispatch/dispatcher.py",
        "event.seconds)\n        self.state.clear_strikes(unit)\n",
        "event.seconds)\n",
        "dispatch/test_strikes.py::test_nothing_is_held_against_a_unit_that_is_over",
    ),
    Fault(
        "dispatcher: a trial that has ended keeps its strikes",
        "dispatch/dispatch_state.py",
        "                self.clear_strikes(unit)",
        "                pass",
        "dispatch/test_strikes.py::test_nothing_is_held_against_a_unit_that_is_over",
    ),
    Fault(
        "dispatcher: the last piece's time is learnt",
        "dispatch/dispatcher.py",
        "not (repeat or was_cut or binding.members)",
        "not (repeat or binding.members)",
        "dispatch/test_dispatch.py::"
        "test_the_last_piece_of_a_unit_does_not_teach_how_long_a_unit_takes",
    ),
    Fault(
        "dispatcher: the time of the last piece of a gang is learnt",
        "dispatch/dispatcher.py",
        "event.seconds and not was_cut:",
        "event.seconds:",
        "dispatch/test_dispatch.py::"
        "test_the_last_piece_of_a_unit_does_not_teach_how_long_a_unit_takes",
    ),
    Fault(
        "dispatcher: evaluation times are never learnt",
        "dispatch/dispatcher.py",
        "self.times.observe_evaluation(unit.trial, worker, event.seconds)",
        "pass",
        "dispatch/test_dispatch.py::test_how_long_scoring_takes_is_learnt_beside_training",
    ),
    Fault(
        "placement: one shard beyond memory after a refusal",
        "dispatch/placement.py",
        "len(chosen[k]) < host.max_shards)",
        "len(chosen[k]) <= host.max_shards)",
        "dispatch/test_placement.py::"
        "test_no_worker_gets_more_than_fits_though_others_refuse_shards",
    ),
    Fault(
        "world: no trial fails that is paused",
        "testing/world.py",
        "victims = sorted({trial.number for trial in [*movers, *begun]})",
        "victims = sorted({trial.number for trial in movers})",
        "flows/test_world.py",
    ),
    Fault(
        "home: what a killed writer has left of a study keeps it from being opened",
        "study/home.py",
        'found = _is_in(path, name, "rw")',
        'found = _is_in(path, name, "ro")',
        "study/test_home.py",
    ),
    Fault(
        "control: a command that has its answer is taken again",
        "storage/runs/control.py",
        'if f"{found[1]}.answer.json" in kinds:',
        "if False:",
        "storage/runs/test_control.py",
    ),
    Fault(
        "control: a command with another's token is taken",
        "storage/runs/control.py",
        "if not is_ours:",
        "if False:",
        "storage/runs/test_control.py",
    ),
    Fault(
        "cli: an error ends with 0",
        "cli/answer.py",
        "raise click.exceptions.Exit(NOT_WELL)",
        "raise click.exceptions.Exit(WELL)",
        "cli/test_answers.py",
    ),
    Fault(
        "cli: NaN is printed as no parser reads it",
        "cli/answer.py",
        "if isinstance(part, float) and not math.isfinite(part):",
        "if False:",
        "cli/test_answers.py",
    ),
    Fault(
        "held shards: a full disk is not waited for",
        "execution/held_shards.py",
        "self._from_disk(shard, waits=True)",
        "self._from_disk(shard)",
        "workers/test_held_shards.py",
    ),
    Fault(
        "wandb: what was told before a kill stays beside what is told again",
        "observers/wand_b.py",
        "shutil.rmtree(old)",
        "pass",
        "observers/test_trackers.py::test_a_search_that_goes_on_writes_offline_runs_of_wandb_anew",
    ),
    Fault(
        "notebook: clicks wait for the cell that has begun the search",
        "views/notebook.py",
        "        _hear_beside_cells(self._widget)\n",
        "",
        "notebook/test_live_view.py",
    ),
    Fault(
        "dispatcher: what was scored with a unit stays to be scored",
        "dispatch/dispatcher.py",
        "in event.scored:\n            epoch.unscored &= ~(1 << shard)\n",
        "in event.scored:\n",
        "dispatch/test_at_once.py",
    ),
    Fault(
        "dispatcher: a shard that is to be scored is dropped",
        "dispatch/shard_moves.py",
        "| binding.shards",
        "| 1 << binding.shard",
        "dispatch/test_at_once.py",
    ),
    Fault(
        "scheduler: what was scored with a unit is scored again",
        "execution/scheduler_plugin.py",
        "if self._scored and not self._closed:",
        "if False:",
        "execution/test_units.py",
    ),
)
