# What a user runs. CI runs `make -j2 test newest-short` and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests start hundreds of processes: what one has compiled, the others read.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test checks lint types imports doctest tests quick slurm test-gpu docs bench bench-dispatch \
	bench-engine bench-smoke papers papers-lookahead papers-virtual newest newest-short chromium laws shuffle coverage churn chaos replay examples tutorials pages attack known-faults mutants nightly clean \
	release-check constraints

help:
	@echo "make demo            train a small search on scikit-learn's digits"
	@echo "make test            lint, types, import contracts, doctests, tests"
	@echo "make quick           all that is pure or simulated: for each save of a file"
	@echo "make test-gpu        the tests that need a GPU, with dask-cuda"
	@echo "make nightly         what has more than one seed, with all of them: hours; .ci/nightly runs it"
	@echo "make tutorials       run the tutorials, and put what they show into their pages"
	@echo "make docs            build the documentation into site/"
	@echo "make bench-dispatch  quality of dispatching against the bound"
	@echo "make bench-engine    what the engine costs on a real cluster"
	@echo "make bench-smoke     each benchmark in its smallest size: does it still run?"
	@echo "make bench           the benchmarks, an hour; writes docs/measured/benchmarks.md; DATA=PATH of the MNIST files, ONLY=peers,engine"
	@echo "make papers          the experiments of four papers beside ours, an hour; writes docs/measured/papers/ or OUT; DATA=PATH of the MNIST files"
	@echo "make slurm           Debian's Slurm, for the tests on it; as root"
	@echo "make chromium        Debian's Chromium, for the tests in a browser; as root"
	@echo "make churn           the churn test with the oldest and the newest distributed; all of Slurm's"
	@echo "make newest-short    the laws and a short churn test with the newest supported Dask"
	@echo "make replay          replay and determinism over ten seeds"
	@echo "make laws            all that is pure or simulated, 500 examples a law"
	@echo "make shuffle         all tests in five random orders"
	@echo "make coverage        all tests; which branches do they run? Writes docs/measured/coverage.md"
	@echo "make known-faults    faults that no test saw once, put in one by one: each is seen"
	@echo "make mutants         300 small faults drawn by chance: how many do the tests see?"
	@echo "make examples        the examples and the tutorials in all their forms"
	@echo "make pages           a page of a paper, to the digit"
	@echo "make attack          500 damaged run directories and data sets, and the other attacks"
	@echo "make release-check   build wheel and sdist, compare them with the tree, install and run them elsewhere"
	@echo "make constraints     write constraints.txt from pyproject.toml; UPGRADE=1 takes the newest versions"
	@echo "make chaos           50 searches under faults of all kinds; writes docs/measured/chaos.md"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Compiled is what is imported, and not all that is installed, which takes pip as long again.
# By its path, and not by a finder: a script beside a folder that is called dagsel, as a clone is, would find that folder.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --config-settings editable_mode=compat -e
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) ".[examples]"
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) ".[dev]"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python examples/digits.py

# Else each of the processes that run tests would compile all that they import, at the same time. Once is enough. What is
# wrong there they say themselves.
$(VENV)/.compiled: $(VENV)/.dev
	$(BIN)/python -m pytest -q --collect-only tests > /dev/null || true
	@touch $@

# What reads the code runs beside what runs it. With -j2, what root installs comes beside what pip does.
test: $(VENV)/.dev chromium $(VENV)/.compiled
	$(MAKE) -j2 checks tests

checks: lint types imports doctest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

doctest: $(VENV)/.dev
	$(BIN)/python -m pytest --doctest-modules -q dagsel

# A batch system for tests/execution/test_slurm.py, which is skipped where it cannot be had.
slurm:
	@PATH="$$PATH:/usr/sbin"; command -v slurmctld >/dev/null && command -v munged >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -q \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurm-wlm munge; } \
		|| echo "Slurm is not here, and only root can install it with apt-get: its tests are skipped"

# A browser for the tests of pages and of notebooks, which are skipped where it cannot be had. After Slurm: one
# apt-get at a time.
chromium: slurm
	@command -v chromium >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -q \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; } \
		|| echo "Chromium is not here, and only root can install it with apt-get: its tests are skipped"

# On two cores four files at a time, as what has a cluster of its own waits for a part of its time, and beside
# them those that wait for most of it, one after the other: `Lanes` in tests/conftest.py.
TESTS := pytest -q -n 5 --dist loadfile --no-loadscope-reorder tests
tests: $(VENV)/.dev chromium
	$(BIN)/python -m $(TESTS)

shuffle: $(VENV)/.dev chromium
	for seed in 1 2 3 4 5; do $(BIN)/python -m $(TESTS) -p randomly --randomly-seed=$$seed || exit; done

coverage: $(VENV)/.dev chromium
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/python tests/covered.py

PURE := dispatch driver flows history planning observers simulation views workers \
	test_codec.py test_flow.py test_messages.py test_metrics.py
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile=quick -m "not alone and not slow" $(PURE:%=tests/%)

laws: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile=long --timeout 3600 $(PURE:%=tests/%)

# Beside the tested versions: the torch there must be a build for CUDA.
$(VENV)/.cuda: $(VENV)/.dev
	$(INSTALL) ".[cuda]"
	@touch $@

test-gpu: $(VENV)/.cuda
	$(BIN)/python -m pytest -q -m gpu tests

tutorials: $(VENV)/.dev
	$(BIN)/python -m tests.execution.slurm $(BIN)/python tests/tutorials.py

docs: $(VENV)/.dev
	$(BIN)/zensical build --strict

bench-dispatch: $(VENV)/.dev
	$(BIN)/python tests/benchmarks/dispatch.py

bench-engine: $(VENV)/.dev
	$(BIN)/python tests/benchmarks/engine.py

BENCH := $(BIN)/python tests/benchmarks
# They end with 3 where they ran and missed a bar, as on a busy machine.
OR_MISSED := || [ $$? -eq 3 ]
bench-smoke: $(VENV)/.dev
	$(BENCH)/dispatch.py --quick $(OR_MISSED)
	$(BENCH)/engine.py $(OR_MISSED)
	$(BENCH)/simulator.py $(OR_MISSED)
	$(BENCH)/checkpoints.py
	$(BENCH)/determinism.py
	$(BENCH)/unit_overhead.py --repeats 1
	$(BENCH)/suspend_resume.py --megabytes 1 --repeats 1
	$(BENCH)/time_sharing.py --megabytes 1 $(OR_MISSED)
	$(BENCH)/write_memory.py --gigabytes 0.2 $(OR_MISSED)
	$(BENCH)/held_on_disk.py --megabytes 40 --repeats 1 $(OR_MISSED)
	$(BENCH)/papers/hermes.py --orders 1 --out build/papers
	$(BENCH)/papers/cerebro.py --limit 0.01 --out build/papers
	$(BENCH)/papers/seer.py --quick --out build/papers
	$(BENCH)/papers/cerebro_cluster.py --quick --out build/papers
	$(BENCH)/papers/cerebro_faults.py --quick --out build/papers
	$(BENCH)/papers/cerebro_training.py --quick --out build/papers
	$(BENCH)/papers/hermes_cluster.py --quick --out build/papers
	$(BENCH)/papers/seer_training.py --quick --out build/papers
	$(BENCH)/papers/lookahead.py --quick --only comparison --out build/papers
	$(BENCH)/seer_cluster.py --seeds 1 --quiet
	$(BENCH)/flows_on_digits.py --seeds 1
	$(BENCH)/deadlines.py --runs 1
	$(BENCH)/peers.py --rounds 1 --trials 8 --only dagsel,plain $(OR_MISSED)
	$(BENCH)/tabular.py --rounds 1 --trials 8 --many 0 $(OR_MISSED)
	$(BENCH)/display.py --trials 64 --repeats 1 $(OR_MISSED)

# It names the bars that were missed, and fails if a benchmark did.
bench: $(VENV)/.dev
	$(BENCH)/page.py $(if $(DATA),--data $(DATA)) $(if $(ONLY),--only $(ONLY)) $(OR_MISSED)

# The experiments of four papers beside ours: in virtual time, two at once, and then in real training, one
# after the other; writes docs/measured/papers/, or the folder OUT.
WHERE := $(if $(OUT),--out $(OUT))
MNIST := $(WHERE) $(if $(DATA),--data $(DATA))
papers: $(VENV)/.dev
	$(MAKE) -j2 papers-lookahead papers-virtual
	$(BENCH)/papers/cerebro_cluster.py $(MNIST)
	$(BENCH)/papers/cerebro_faults.py $(WHERE)
	$(BENCH)/papers/cerebro_training.py $(MNIST)
	$(BENCH)/papers/hermes_cluster.py $(MNIST)
	$(BENCH)/papers/seer_training.py $(MNIST)

papers-lookahead:
	$(BENCH)/papers/lookahead.py $(WHERE)

papers-virtual:
	$(BENCH)/papers/cerebro.py $(WHERE)
	$(BENCH)/papers/hermes.py $(WHERE)
	$(BENCH)/papers/marble.py $(WHERE)
	$(BENCH)/papers/seer.py $(WHERE)

# The newest supported Dask lies over the tested one, in a folder that comes first on the path.
NEWEST := $(VENV)/newest
$(NEWEST): $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-deps --target $@ "dask==2026.8.*" "distributed==2026.8.*"

newest: $(NEWEST)
	PYTHONPATH=$(NEWEST) CHURN_SEEDS=20 $(BIN)/python -m pytest -q tests/laws tests/execution/test_churn.py

newest-short: $(NEWEST) $(VENV)/.compiled
	PYTHONPATH=$(NEWEST) CHURN_SEEDS=2 $(BIN)/python -m pytest -q tests/laws/test_laws.py tests/execution/test_churn.py

churn: $(VENV)/.dev newest
	CHURN_SEEDS=20 GANGS=200 MACHINE_SEEDS=5 SLURM=all MARBLE_CASES=all DISK_TIMES=4 CLUSTERS=all $(BIN)/python -m pytest -q \
		tests/execution/test_resumed_elsewhere.py tests/execution/test_seer_cluster.py tests/execution/test_gateway.py tests/execution/test_dashboard.py \
		tests/execution/test_churn.py tests/execution/test_held_on_disk.py tests/execution/test_gangs.py tests/execution/test_marble_cluster.py tests/execution/test_machines.py tests/execution/test_slurm.py

chaos: $(VENV)/.dev
	$(BIN)/python tests/chaos/chaos.py 50 docs/measured/chaos.md
	for library in adapter lightning flax keras; do $(BIN)/python tests/chaos/chaos.py 5 docs/measured/chaos.md $$library || exit 1; done

replay: $(VENV)/.dev
	REPLAY_SEEDS=10 LIBRARIES=all $(BIN)/python -m pytest -q tests/laws/test_replay.py \
		tests/execution/test_jax_and_keras.py tests/execution/test_base_on_workers.py tests/workloads/test_keras.py

known-faults: $(VENV)/.dev
	$(BIN)/python tests/mutants/known.py

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants/mutate.py --n 300 --seed 0

examples: $(VENV)/.dev
	EXAMPLES=all $(BIN)/python -m pytest -q --timeout 900 tests/examples tests/test_tutorials.py

pages: $(VENV)/.dev
	PAGES=all $(BIN)/python -m pytest -q tests/flows/test_marble_paper.py tests/test_procedures.py

attack: $(VENV)/.dev
	ATTACK_CASES=500 ATTACK_SECONDS=60 $(BIN)/python -m pytest -q --timeout 3600 tests/attack tests/dispatch/test_strikes.py

release-check: $(VENV)/.dev
	$(BIN)/python tests/release.py

# pip alone must work here: uv, which resolves the versions, comes into an environment of its own.
constraints: $(VENV)/.dev
	$(BIN)/python tests/release.py --write-constraints $(if $(UPGRADE),upgrade,hold)

nightly: laws shuffle coverage churn chaos replay examples pages attack bench-smoke known-faults mutants

clean:
	rm -rf $(VENV) build dist site *.egg-info dagsel-runs
