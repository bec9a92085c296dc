# Every target makes the virtual environment it needs, once, and again when pyproject.toml changes.
#   make test PYTEST_ARGS='-k signal'     PYTHON=python3.12 make dev     make pythons PYTHONS='3.12 3.13'

PYTHON ?= python3
# What `make dev` and all tests install: the versions of `requirements-dev.lock`, checked by their hashes.
# `make dev LOCKED=no` takes the newest that pyproject.toml allows.
LOCKED ?= yes
PYTEST_ARGS ?=
CHAOS_ARGS ?=
PYTHONS ?=
# Where `make docs` puts the documentation of this version, beside that of others.
SITE ?= build/site
# Many tests wait for a time or for a server rather than for the machine, so there are more workers than cores. Each
# worker imports all tests first, so the quick ones, which rarely wait, have fewer.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS = $(shell expr 3 '*' $(CORES))
PARALLEL ?= -n $(WORKERS) --dist worksteal

VENV := .venv
DEMO := build/demo
BIN := $(VENV)/bin
VENV_STAMP := $(VENV)/.made
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
IMPORTED_STAMP := $(VENV)/.imported
PEERS := build/peers
PEERS_STAMP := $(PEERS)/.installed
PEERS_ARGS ?=
SIM_SECONDS ?= 600
SIM_ARGS ?=
CODE = $(wildcard src tests tools bench examples)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode each worker would compile the package and all tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test coverage browser commands pictures style lint format bench bench-peers sim soak chaos dev contract diagram tables docs lock audit pythons release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(RUN_STAMP) ## Watch a hundred orders survive the SIGKILL of their worker
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	@$(BIN)/python examples/orders.py --keep $(DEMO)
	@echo
	@echo "To see these orders in a browser:  $(BIN)/holdfast dev examples/orders.py --store sqlite:///$(DEMO)/orders.db"
	@echo "and open http://127.0.0.1:8321/"

quick: WORKERS = $(shell expr 2 '*' $(CORES))
quick: style ## The loop while you write: ruff, and the tests that need no server, browser or process (two minutes)
	$(BIN)/pytest $(PARALLEL) -m quick --durations=10 --durations-min=1 $(PYTEST_ARGS)

# Types are checked beside the tests. All tests are imported once before the workers do it, because each of these would
# compile what it finds without bytecode. A test that fails beside others is run once more, alone: a busy machine must not
# decide. Its first failure stays in the output.
test: export TEST_SAMPLED = 1
test: style browser commands ## Lint, and every test in parallel; what CI runs (a quarter of an hour)
	@mkdir -p build; $(BIN)/mypy $(CODE) > build/types.txt & types=$$!; \
	  test -e $(IMPORTED_STAMP) || { $(BIN)/pytest -q --collect-only > /dev/null && touch $(IMPORTED_STAMP); }; \
	  status=0; $(BIN)/pytest $(PARALLEL) --durations=20 $(PYTEST_ARGS) || status=$$?; \
	  wait $$types || { cat build/types.txt; exit 1; }; \
	  if [ $$status -ne 1 ]; then exit $$status; fi; \
	  echo "Once more, alone, what has failed beside others (a test that passes now is unsteady and needs mending):"; \
	  $(BIN)/pytest --verbose --maxfail=1 --last-failed --last-failed-no-failures=none $(PYTEST_ARGS)

coverage: $(DEV_STAMP) browser commands ## Every test with coverage measured, which takes twice as long
	$(BIN)/pytest $(PARALLEL) -m 'not untraced' --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

style: $(DEV_STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

lint: style ## Check style, format and types
	$(BIN)/mypy $(CODE)

# The package of Prometheus is only unpacked: installed, it would start a server.
commands: $(VENV_STAMP) ## Install the commands that tests use, or say what is missing
	@if ! command -v promtool > /dev/null && ! test -x $(BIN)/promtool && command -v apt-get > /dev/null; then \
	  folder=$$(mktemp -d); chmod 755 $$folder; get="apt-get download -qq -o Acquire::http::Timeout=20 prometheus"; \
	  (cd $$folder && { $$get || { apt-get update -qq && $$get; }; } && dpkg-deb -x prometheus_*.deb .) > /dev/null 2>&1 \
	    && cp $$folder/usr/bin/promtool $(BIN)/ || echo "There is no promtool: the alert rules are not tested."; \
	  rm -rf $$folder; \
	fi
	@missing=; for each in curl:curl strace:strace ssh-keygen:openssh-client systemd-analyze:systemd; do \
	    command -v $${each%:*} > /dev/null || missing="$$missing $${each#*:}"; \
	  done; \
	  if [ -z "$$missing" ]; then exit 0; fi; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing$$missing ..."; apt-get update -qq && apt-get install -y -qq $$missing > /dev/null; \
	  else \
	    echo "The tests need more commands. On Debian and Ubuntu: apt-get install$$missing" >&2; exit 1; \
	  fi

# Chromium without windows draws the same pages in a quarter of the time; any other Chromium does as well.
browser: ## Install the browser that the tests of the page need, or say what is missing
	@command -v chromium-headless-shell > /dev/null && exit 0; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing chromium-headless-shell ..."; apt-get update -qq; \
	    apt-get install -y -qq chromium-headless-shell > /dev/null && exit 0; \
	  fi; \
	  for name in chromium chromium-browser google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing chromium ..."; apt-get install -y -qq chromium > /dev/null; \
	  else \
	    echo "The tests of the page need a browser. On Debian: apt-get install chromium-headless-shell" >&2; exit 1; \
	  fi

pictures: $(DEV_STAMP) browser ## Photograph the page for the documentation
	@$(BIN)/python -m tests.web.pictures

format: $(DEV_STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(DEV_STAMP) ## Measure
	@$(BIN)/python -m bench

# Other engines have an environment of their own, by the names of their packages; nothing of them is in ours.
bench-peers: $(DEV_STAMP) $(PEERS_STAMP) ## Measure Holdfast and other engines in turns, and write docs/benchmarks.md (12 minutes)
	@$(BIN)/python -m bench.peers --json build/peers/figures.json --page docs/benchmarks.md $(PEERS_ARGS)

sim: $(DEV_STAMP) ## Play simulated crashes of every kind for SIM_SECONDS; what never happens fails it too
	@$(BIN)/python -m tests.sim.campaign --seconds $(SIM_SECONDS) $(SIM_ARGS)

soak: $(DEV_STAMP) ## Play simulated crashes for twenty minutes, kill 1,000 writers, and more (an hour)
	@$(BIN)/pytest -q $(PARALLEL)
	@$(BIN)/python -m tests.sim.campaign --seconds 1200
	@TEST_KILL_ROUNDS=1000 $(BIN)/pytest -q -s tests/crash/test_kill.py
	@TEST_CALLER_KILLS=350 $(BIN)/pytest -q -s -n 0 tests/transactions/test_killed_callers.py
	@TEST_SCHEDULE_DAYS=366 $(BIN)/pytest -q -s -n 0 tests/sim/test_schedules.py
	@TEST_TICK_SECONDS=60 TEST_TICK_SCHEDULES=50 $(BIN)/pytest -q -s -n 0 tests/crash/test_ticks.py
	@TEST_RETENTION_CYCLES=300 $(BIN)/pytest -q -s -n 0 tests/engine/test_retention.py -k does_not_grow
	@TEST_RELAY_KILLS=100 TEST_RELAY_RUNS=2000 $(BIN)/pytest -q -s -n 0 tests/bus/test_killed_relay.py
	@TEST_S3_SERVER=1 TEST_S3_SEQUENCES=20 $(BIN)/pytest -q -n $(CORES) tests/store/test_s3.py tests/store/test_differential.py
	@TEST_S3_SERVER=1 $(BIN)/pytest -q -n $(CORES) -k s3 tests/engine
	@TEST_PARKED_RUNS=100000 $(BIN)/pytest -q -n 0 tests/store/test_s3_finding.py -k idle_process
	@$(BIN)/python -m tests.chaos --store s3 --nodes 8 --runs 320 --works 62 --seconds 600 --to-the-end --killed-every-s 1 --patience-s 180 --turns 20000
	@TEST_PAYMENTS=5000 $(BIN)/pytest -q -s tests/payments/test_schedules.py
	@TEST_STREAM_CHUNKS=1000000 TEST_STREAM_KILLS=10 TEST_STREAM_READERS=500 $(BIN)/pytest -q -s -n 0 tests/service/test_streams_at_scale.py
	@TEST_EXAMPLES=20 $(BIN)/pytest -q tests/service/test_openapi.py tests/core/test_redaction.py
	@TEST_SCHEMES=light,dark $(BIN)/pytest -q tests/web/test_pictures.py

chaos: $(DEV_STAMP) ## Kill and freeze real nodes at random for five minutes (CHAOS_ARGS='--store failover'; CONTRIBUTING.md)
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

dev: $(DEV_STAMP) ## Set up for development and say what to do next
	@echo "Ready. Next:"
	@echo "  . $(BIN)/activate        use this environment in your shell"
	@echo "  make quick                 the tests to run while you write"
	@echo "  make test                  lint and all tests, as CI runs them"
	@echo "  pytest tests -k signal     some tests"
	@echo "  make contract              which rule is proved by which test"

contract: $(DEV_STAMP) ## List every rule of docs/contract.md with the tests that prove it
	@$(BIN)/python -m tools.contract

diagram: $(RUN_STAMP) ## Draw docs/states.md from the transition table
	@$(BIN)/python -m holdfast.core.diagram > docs/states.md.new || { rm -f docs/states.md.new; exit 1; }
	@mv docs/states.md.new docs/states.md

tables: $(DEV_STAMP) ## Write what is derived: tables of the page and of the docs, stubs of the client
	@$(BIN)/python -m tools.event_tables
	@$(BIN)/python -m tools.client_stubs
	@$(BIN)/ruff check --quiet --fix-only src/holdfast/client/resources.pyi
	@$(BIN)/ruff format --quiet src/holdfast/client/resources.pyi
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.commands
	@$(BIN)/python -m tools.diagrams

docs: $(DEV_STAMP) ## Build the documentation site into build/site; a broken link fails
	@$(BIN)/python -m tools.site_versions $(SITE)
	@echo "Open $(SITE)/index.html, or, with search and versions:  $(BIN)/python -m http.server --directory $(SITE)"

# A registry that pip is told of is not written down: the file has names, versions and hashes.
lock: $(RUN_STAMP) ## Write requirements-dev.lock: the newest versions that pyproject.toml allows, with their hashes
	@$(BIN)/python -m pip install --quiet --group lock
	@SSL_CERT_FILE="$${SSL_CERT_FILE:-$$PIP_CERT}" $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-header --group pyproject.toml:dev pyproject.toml \
	  --output-file requirements-dev.lock > /dev/null
	@echo "$$(grep -c == requirements-dev.lock) packages are in requirements-dev.lock"

# The database of vulnerabilities is asked for each package: this needs more of the network than the registry of packages.
audit: $(RUN_STAMP) ## Look for known vulnerabilities in what is locked, and in the oldest versions that are allowed
	@$(BIN)/python -m pip install --quiet --group audit
	@mkdir -p build; SSL_CERT_FILE="$${SSL_CERT_FILE:-$$PIP_CERT}" $(BIN)/uv pip compile --quiet --resolution lowest-direct \
	  --python-version 3.11 --all-extras pyproject.toml --output-file build/floors.txt > /dev/null
	@for file in requirements-dev.lock build/floors.txt; do echo "$$file:"; \
	  $(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement $$file 2> build/audit.txt && continue; \
	  cat build/audit.txt >&2; \
	  if grep -qE '^Found [0-9]+ known' build/audit.txt; then echo "Raise the versions above: they have known vulnerabilities." >&2; \
	  else echo "Nothing was checked: a package could not be looked up in the public database of vulnerabilities (see above)." \
	    "Run make audit where the public package index answers." >&2; fi; exit 1; done

pythons: $(DEV_STAMP) ## Run the quick tests on each Python from 3.11 to 3.14 that is installed, and say which is missing
	@$(BIN)/python -m tools.pythons $(PYTHONS)

release: $(DEV_STAMP) ## Build the package into dist/ and check it: a pure wheel, its files, hashes, an SBOM; uploads nothing
	@$(BIN)/python -m pip install --quiet --group release
	@$(BIN)/python -m tools.release

clean: ## Remove the virtual environment and everything generated
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Holdfast needs Python 3.11 or newer, and '$(PYTHON)' is not." >&2; \
	  echo "Name another one:  make $(or $(MAKECMDGOALS),dev) PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# The package alone: enough for the demo, and a matter of seconds.
$(RUN_STAMP): $(VENV_STAMP) pyproject.toml
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(DEV_STAMP): $(VENV_STAMP) pyproject.toml requirements-dev.lock
	@echo "Installing the development tools ..."
ifeq ($(LOCKED),yes)
	@$(BIN)/python -m pip install --quiet --no-compile --require-hashes --requirement requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable . --group dev
endif
	@rm -f $(IMPORTED_STAMP)
	@touch $@ $(RUN_STAMP)

$(PEERS_STAMP): bench/peers/requirements.txt bench/peers/package.json
	@echo "Installing the engines that Holdfast is compared with into $(PEERS) ..."
	@mkdir -p $(PEERS)
	@$(PYTHON) -m venv $(PEERS)/venv
	@$(PEERS)/venv/bin/python -m pip install --quiet --requirement bench/peers/requirements.txt
	@cp bench/peers/package.json $(PEERS)/
	@command -v npm > /dev/null && npm install --prefix $(PEERS) --ignore-scripts --no-audit --no-fund --loglevel=error \
	  || echo "Without npm there is no Restate server; the others are measured."
	@touch $@
