# dpfl: `make demo` runs the main job, `make test` runs all tests. Each sets up .venv first, once, with what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where torch comes from: `make TORCH_INDEX=<address of PyTorch's CPU-only index> demo` avoids several GB of CUDA.
TORCH_INDEX ?=
TORCH := $(VENV)/.torch
USE := $(VENV)/.set-up
DEPLOY := $(VENV)/.set-up-for-deployment
DEVELOP := $(VENV)/.set-up-for-development
CONTROLS ?= 10
MINUTES ?= 10
# pip would compile thousands of modules that are never imported, on one core: each is compiled when it is first imported.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo deploy-demo test arithmetics compiled-tests lint nightly audit fuzz bench bench-gate bench-kernels bench-secure-sum bench-kills bench-sites bench-port setup setup-dev clean help

help:
	@echo "make demo   set up, compare eighteen methods on a federation of 20 clients and write a report (about a minute)"
	@echo "make deploy-demo  three real sites and a server on this machine, over TLS, with keys (about a minute)"
	@echo "make test   set up for development and run all tests, style and type checks"
	@echo "make arithmetics  recorded bits and reference values once more, with other kernels of torch and OpenBLAS (under two minutes)"
	@echo "make lint   style, types and import contracts only"
	@echo "make nightly  what takes long: more examples for every law, coverage, a wheel in an empty environment"
	@echo "make audit  lower bounds on what every method reveals, and how often deliberate faults are caught (about an hour)"
	@echo "make fuzz   mangled files and messages at every door (MINUTES=10)"
	@echo "make bench  measure against Opacus, pfl and Flower (about an hour; BENCH=--quick to see that it runs)"
	@echo "make bench-gate AGAINST=COMMIT  fails where a round or a start takes 5 % more processor time than at that commit (minutes)"
	@echo "make bench-kills, bench-sites, bench-port  random kills of a real federation; many sites; strangers at the port (minutes)"
	@echo "make clean  remove .venv and caches"

demo: $(USE)
	$(BIN)/dpfl compare examples/demo.toml --family heterogeneous --seeds 3

deploy-demo: $(DEPLOY)
	rm -rf runs/deploy-demo
	$(BIN)/dpfl deploy example runs/deploy-demo
	$(BIN)/dpfl deploy run runs/deploy-demo

test: $(DEVELOP)
	$(MAKE) --jobs 2 lint compiled-tests
	$(BIN)/python -m pytest -n 3 --dist loadgroup -q

# What may not depend on the kernels in use; `make test` has them as the machine is.
ON_ALL_KERNELS := $(BIN)/python -m pytest -n 2 -q tests/equivalence tests/privacy/test_accountant.py
arithmetics: $(DEVELOP)
	env $(addprefix -u ,$(filter OPENBLAS_%,$(.VARIABLES))) $(ON_ALL_KERNELS)
	OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 $(ON_ALL_KERNELS)
	ATEN_CPU_CAPABILITY=default $(ON_ALL_KERNELS)

# One process compiles the tests and what they import while types are checked; otherwise each worker would.
compiled-tests: $(DEVELOP)
	@$(BIN)/python -m pytest --collect-only -qqq > /dev/null || true  # the tests themselves tell what is wrong

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(DEVELOP)
	DPFL_HYPOTHESIS=nightly $(BIN)/python -m pytest -n 2 --dist loadgroup -q --cov=dpfl --cov-report=term:skip-covered
	rm -rf build/wheel && $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	$(PYTHON) -m venv build/wheel/.venv
	build/wheel/.venv/bin/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	build/wheel/.venv/bin/python -m pip install --quiet -c constraints.txt build/wheel/*.whl
	cd build/wheel && .venv/bin/dpfl run --dataset heart_disease --method fedavg_dp --budgets 0.5,1,2,8 --delta 1e-3 --clip 1 --rounds 2 --out run

audit: $(DEVELOP)
	$(BIN)/dpfl audit --all --out runs/audit
	$(BIN)/dpfl audit --all --sites --canaries 320 --trials 120 --out runs/audit-sites
	$(BIN)/dpfl audit weiavg --sites --canaries 320 --trials 240 --adjacency zero_out --controls $(CONTROLS) --out runs/audit-site-controls
	$(BIN)/dpfl audit weiavg udp_fedavg preconditioned --adjacency zero_out --controls $(CONTROLS) --out runs/audit-controls

bench: $(DEVELOP)
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m bench.run $(BENCH)
	$(BIN)/python -m bench.kernels $(filter --quick,$(BENCH))
	$(BIN)/python -m bench.secure_sum $(filter --quick,$(BENCH))

bench-gate: $(DEVELOP)
	$(if $(AGAINST),,$(error name the commit to compare with: make bench-gate AGAINST=COMMIT))
	$(BIN)/python -m bench.run --against $(AGAINST) --only W2,W3,dp_fed,noise,start --limit 1.05

bench-sites: $(DEVELOP)
	$(BIN)/python -m bench.sites
	$(BIN)/python -m bench.sites --sites 2 --records 150000

bench-port: $(DEVELOP)
	$(BIN)/python -m bench.port

bench-kills: $(DEVELOP)
	$(BIN)/python -m bench.kills
	$(BIN)/python -m bench.kills_everywhere

fuzz: $(DEVELOP)
	DPFL_HYPOTHESIS=fuzz DPFL_FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest -q tests/fuzz

bench-secure-sum: $(DEVELOP)
	$(BIN)/python -m bench.secure_sum $(BENCH)

bench-kernels: $(DEVELOP)
	$(BIN)/python -m bench.kernels

setup: $(USE)

setup-dev: $(DEVELOP)

$(TORCH): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dpfl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing. On Debian or Ubuntu: sudo apt-get install -y python3-venv"; exit 2; }
	@echo "Setting up $(VENV), once: PyTorch, then everything else (a minute or two; pip prints nothing meanwhile)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# Each installs only what it needs, in one step.
$(USE): EXTRAS :=
$(DEPLOY): EXTRAS := [flower]
$(DEVELOP): EXTRAS := [dev]
$(USE) $(DEPLOY) $(DEVELOP): $(TORCH) pyproject.toml
	$(INSTALL) -e '.$(EXTRAS)'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info src/*.egg-info
