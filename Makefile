# make demo · make up · make test · make test-long · make ui-test · make real · make gpu · make campaigns · make peers · make lint · make bench
# make wheel
PYTHON ?= python3.11
# On another Python, also TORCH=torch==2.13.0+cpu: digests of torch's CPU build are known for 3.11.
TORCH ?= --require-hashes -r requirements/torch-cpu.txt
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
SERVERS := $(VENV)/servers
LAUNCHERS := $(VENV)/launchers
BROWSER := $(VENV)/browser
ENVIRONMENTS := tests/data/test_data_reasoning_gym.py tests/environments/test_verifiers_environments.py \
	tests/stages/test_rl_libraries.py tests/environments/test_rewards_of_environments.py tests/stages/test_lm_eval.py
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo up down test test-long ui-test real gpu campaigns peers lint bench wheel lock clean

demo: $(VENV)/.run
	$(BIN)/align run quickstart

up: $(VENV)/.run
	$(BIN)/align up

down: $(VENV)/.run
	$(BIN)/align down

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(PYTEST)

# Learning with three seeds, runs that are killed at random, whole matrices of layouts and methods, and fifty runs in a row; alone
# on the machine, for each takes all cores.
test-long: $(VENV)/.test
	ALIGN_TESTS_PRELOADED=0 $(BIN)/python -m pytest tests/long $(PYTEST)
	$(BIN)/python -m pytest -m exhaustive $(PYTEST)
	$(BIN)/python -m tests.benchmarks soak

# The pages of `align ui` in headless Chromium, which has to be installed (Debian's package is called chromium).
ui-test: $(BROWSER)
	PYTHONPATH=$(CURDIR)/$(BROWSER) $(BIN)/python -m pytest tests/browser $(PYTEST)

# A pretrained model on real rows (REAL_DATA), by every method; resumes and is cached, SEEDS=3 adds two seeds.
real: $(VENV)/.test
	$(BIN)/python -m tests.real $(REAL)

# One GPU, with what is installed: in $(VENV) if there is one, otherwise in $(PYTHON). GPU="--only attention head" for some parts.
gpu:
	PYTHONPATH=$(CURDIR) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu $(GPU)

campaigns: $(VENV)/.test
	$(BIN)/python -m tests.campaigns

peers: $(PEERS)/.run
	PYTHONPATH=$(CURDIR) $(PEERS)/bin/python -m pytest tests/peers $(ENVIRONMENTS) $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python -m tests.benchmarks

wheel:
	rm -rf build dist  # what was deleted since would be in it
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

$(VENV)/.run: requirements/cpu.txt requirements/python-3.13.txt requirements/torch-cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps $(TORCH) || { \
		echo "torch's CPU build was not installed: does PIP_EXTRA_INDEX_URL name PyTorch's own package index?" >&2; exit 1; }
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/cpu.txt -r requirements/python-3.13.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.run $(SERVERS) $(LAUNCHERS)
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/test.txt
	touch $@

# The tests' S3 server, which runs beside what is tested: it pins a botocore that s3fs does not take.
$(SERVERS): requirements/servers.txt $(VENV)/.run
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --require-hashes --target $@ -r requirements/servers.txt
	touch $@

# What judges the files of deployments/, and Ray's dashboard as the images have it.
$(LAUNCHERS): requirements/launchers.txt requirements/cluster.txt $(VENV)/.run
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --require-hashes --target $@ -r requirements/launchers.txt -r requirements/cluster.txt
	touch $@

# Playwright, which drives the browser, and axe-core; its greenlet is the one in $(VENV).
$(BROWSER): requirements/browser.txt $(VENV)/.test
	rm -rf $@
	$(BIN)/pip install --quiet --no-deps --require-hashes --target $@ -r requirements/browser.txt
	touch $@

PURELIB := -c "from sysconfig import get_path; print(get_path('purelib'))"

# Sees what lies in $(VENV), and adds the peers and the extra `environments` to it without touching it.
$(PEERS)/.run: requirements/peers.txt requirements/peers-older.txt requirements/environments.txt requirements/lm-eval.txt \
		$(VENV)/.test
	rm -rf $(PEERS)
	$(BIN)/python -m venv --without-pip $(PEERS)
	$(BIN)/python $(PURELIB) > "$$($(PEERS)/bin/python $(PURELIB))/shared.pth"
	$(BIN)/pip --python $(PEERS)/bin/python install --quiet --no-deps --require-hashes \
		-r requirements/peers.txt -r requirements/environments.txt -r requirements/lm-eval.txt
	$(BIN)/pip install --quiet --no-deps --require-hashes --target $(PEERS)/openrlhf-0.8.11 \
		-r requirements/peers-older.txt  # the last release that had losses of KTO, distillation and process reward models
	touch $@

# torch of the package index is its CUDA build for Linux, so that here it is locked beside the rest, and for x86_64 alone.
FOR_CUDA := --python-platform x86_64-manylinux_2_28 --override requirements/overrides-cuda.txt
COMPILE := uv pip compile --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header
LOCK := $(COMPILE) pyproject.toml --override requirements/overrides.txt --no-emit-package torch

lock:
	$(LOCK) --extra cpu --extra tracking -o requirements/cpu.txt
	$(LOCK) --extra cpu --extra tracking --extra test -c requirements/cpu.txt -o requirements/test.txt
	cp requirements/test.txt requirements/.all
	$(LOCK) --extra cpu --extra tracking --extra test --extra environments -o requirements/.all
	grep -vxF -f requirements/test.txt requirements/.all > requirements/environments.txt
	$(LOCK) --extra cpu --extra tracking --extra cluster -c requirements/cpu.txt -o requirements/.all
	grep -vxF -f requirements/cpu.txt requirements/.all > requirements/cluster.txt
	rm requirements/.all
	cp requirements/cpu.txt requirements/cuda.txt  # the same versions of all that both need
	$(COMPILE) pyproject.toml $(FOR_CUDA) --extra cuda --extra tracking -o requirements/cuda.txt
	$(COMPILE) requirements/servers.in -o requirements/servers.txt
	$(COMPILE) requirements/launchers.in -c requirements/test.txt -o requirements/launchers.txt

clean:
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache
