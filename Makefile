# Everything sets itself up: on a machine with git, make and Python 3.11 or newer, `make demo` and `make test`
# need nothing else. The environment is .venv; a change of pyproject.toml, constraints.txt or what is compiled renews it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .make
COMPILED := $(shell find commprof -name '_*.[ch]') commprof/schema.py commprof/trace/rank_files/layout.py
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed and none was found on PATH; install it, or say which: make PYTHON=/path/to/python3" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || sh tools/apt_install.sh python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# torch first: where an index serves a build of this exact version for the CPU, that one is taken.
$(STAMPS)/install: $(STAMPS)/venv pyproject.toml constraints.txt hatch_build.py $(COMPILED)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/install
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev
	@touch $@

$(STAMPS)/chromium: $(STAMPS)/venv
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 \
		|| sh tools/apt_install.sh chromium \
		|| echo "make: no Chromium, and it could not be installed: the browser tests will be skipped" >&2
	@touch $@

$(STAMPS)/java: $(STAMPS)/venv
	@command -v java >/dev/null 2>&1 || test -n "$$JAVA_HOME" \
		|| sh tools/apt_install.sh openjdk-17-jre-headless || sh tools/apt_install.sh default-jre-headless \
		|| echo "make: no Java, and it could not be installed: the tests on Spark will be skipped" >&2
	@touch $@

$(STAMPS)/simgrid: $(STAMPS)/venv
	@/usr/bin/python3 -c "import simgrid" >/dev/null 2>&1 || sh tools/apt_install.sh python3-simgrid \
		|| echo "make: no SimGrid, and it could not be installed: schedules are not compared with its" >&2
	@touch $@

$(STAMPS)/tex: $(STAMPS)/venv
	@command -v pdflatex >/dev/null 2>&1 || sh tools/apt_install.sh texlive-latex-base texlive-latex-recommended \
		|| echo "make: no pdflatex, and it could not be installed: the tables of commprof paper are not compiled" >&2
	@touch $@

.PHONY: setup
setup: $(STAMPS)/install ## make .venv with commprof, zero_runtime and the dashboard

.PHONY: demo
demo: setup ## the main job: sweep the gradient reductions over a small GPT, compare, align, say how to look
	@$(BIN)/python examples/demo.py

.PHONY: format
format: $(STAMPS)/dev ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lint
lint: $(STAMPS)/dev ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(STAMPS)/dev ## mypy, strict
	$(BIN)/mypy

.PHONY: contracts
contracts: $(STAMPS)/dev ## who may import what
	$(BIN)/lint-imports

.PHONY: docs
docs: $(STAMPS)/install ## write the generated pages of docs/
	$(BIN)/python docs/generate.py

.PHONY: docs-site
docs-site: $(STAMPS)/install ## docs/ as a site in build/site, links checked
	$(BIN)/python -m pip install --quiet -c constraints.txt --group site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.PHONY: checks
checks: $(STAMPS)/dev ## lint, types and contracts, two at a time
	@$(MAKE) --no-print-directory -j 2 types $(BESIDE_CHECKS) lint contracts

# In a new clone the tests are compiled once, beside the checks, and not by every worker; later what has changed is, by each.
test test-all: BESIDE_CHECKS := $(STAMPS)/compiled-tests

$(STAMPS)/compiled-tests: $(STAMPS)/dev
	@$(BIN)/python -m pytest -q --collect-only >/dev/null || true
	@touch $@

WORKERS ?= 3

# Tests beside each other, except what measures times: one more than there are processors on the machine that this is meant
# for, since ranks and browsers wait. In the order of the folders, so that the quick unit tests come last and no long file
# is left to one of the workers. The second part runs although the first failed: both say what is wrong. It collects only
# the files that have such tests. $(1): which tests, and a space.
define pytest
	@failed=0; \
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(1)not alone" || failed=1; \
	$(BIN)/python -m pytest -q -m "$(1)alone" $$(grep -rl --include='test_*.py' 'mark\.alone' tests) || failed=1; \
	exit $$failed
endef

.PHONY: test
test: checks $(STAMPS)/chromium $(STAMPS)/java ## what .ci/run calls: all tests but the long sets
	$(call pytest,not long and )

.PHONY: test-all
test-all: checks $(STAMPS)/chromium $(STAMPS)/java $(STAMPS)/simgrid $(STAMPS)/tex ## everything, the long sets too
	$(call pytest,)

# The sets that depend on torch's insides, with another torch than .venv has: what records, what finds the ranks, what
# trains. The environment stays, and a set that failed can be run in it by hand. A build for CUDA takes 6 GB.
VERSION ?= 2.15.0
TORCH_VENV := .venv-torch-$(VERSION)
TORCH_SETS := $(addprefix tests/,unit/commprof/recorder unit/zero_runtime \
	$(addprefix integration/,$(addprefix recorder/,test_c*.py test_d*.py test_f*.py test_g*.py test_m*.py test_p*.py \
	test_s*.py test_times.py) launch/test_injection.py launch/test_process_end.py ledger/test_wrappers.py \
	$(addprefix zero_runtime/,test_engine.py test_offload.py test_overlap.py test_precision.py test_records.py \
	test_reductions.py test_stage3*.py test_checkpoint.py test_pipeline_engine.py test_tensor_parallel.py)))

$(TORCH_VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(COMPILED) | $(STAMPS)/venv
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet -c $(TORCH_VENV)/constraints.txt torch==$(VERSION) -e '.[analysis,export,train]' \
		hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

.PHONY: test-torch
test-torch: $(TORCH_VENV)/installed ## the recorder's, injection's and zero_runtime's core sets with torch VERSION, in an environment of its own
	@failed=0; \
	$(TORCH_VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m "not long and not alone" $(wildcard $(TORCH_SETS)) || failed=1; \
	$(TORCH_VENV)/bin/python -m pytest -q -m "not long and alone" $(wildcard $(TORCH_SETS)) || failed=1; \
	exit $$failed

.PHONY: house
house: $(STAMPS)/dev ## figures about the structure of the code
	$(BIN)/python tools/house.py

.PHONY: bench
bench: $(STAMPS)/dev ## the benchmarks: a table and JSON each
	$(BIN)/python benchmarks/recorder_cost.py
	$(BIN)/python benchmarks/trace_size.py
	$(BIN)/python benchmarks/start_time.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/finalise.py --records 1000000 --ranks 4
	$(BIN)/python benchmarks/nccl_parse.py --size 20000000 --rounds 3

.PHONY: clean
clean: ## remove the environment and what was built; runs are kept
	find commprof -name '_*.so' -delete
	rm -rf $(VENV) .venv-torch-* $(STAMPS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
