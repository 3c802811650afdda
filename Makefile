# The verbs of this repository; continuous integration runs exactly `make test`.
#   PYTHON      interpreter for the environment: 3.11 or 3.12
#   TORCH_SPEC  what pip is asked for torch, e.g. TORCH_SPEC="torch==2.13.0+cpu" with PIP_ARGS naming an index that has it
#   PIP_ARGS    further arguments of pip install
#   PAIR        directory of the padded pair that bench-gpu measures; made there if it is missing
#   SHAPE       sizes of that pair, see tlt bench pad --help
#   GPUS        of test-gpu and bench-gpu: 1, or 2 for what runs over two; records are then named by the width, and by a SHAPE other than the default
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1 && echo "$$p" && break; done)
TORCH_SPEC ?= torch
PIP_ARGS ?=
ARGS ?=
PYTEST_ARGS ?= -n 3
PAIR ?= /tmp/padded-7b
HARD ?= /tmp/padded-7b-hard
SHAPE ?= qwen2.5-7b
GPUS ?= 1
RESULTS ?= benchmarks/results
ON_PAIR = --device cuda --model "$(PAIR)/target" --drafter "$(PAIR)/drafter" $(ARGS)
FP8 = --quantization fp8
OVER = --tensor-parallel "$(GPUS)"
WIDE = $(patsubst %,-%,$(filter-out qwen2.5-7b,$(SHAPE)))-tp$(GPUS)-gpu.json
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CODE := tlt_server clients tests $(wildcard kernels examples benchmarks)

.PHONY: setup demo check test test-long kernels test-gpu lint proto tools screenshots docs bench padded bench-gpu bench-one-gpu bench-gpus soak clean help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(STAMP): pyproject.toml kernels/pyproject.toml clients/pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 or 3.12 found: install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 2; fi
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"$(PYTHON) is Python {v[0]}.{v[1]}; this project needs 3.11 or 3.12: name one with make PYTHON=...")'
	@echo "Setting up $(VENV) with $(PYTHON). Download: about 2.4 GB with a CUDA build of torch, about 0.5 GB with a CPU build; less what pip has cached."
	"$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/python" -m pip install -q -c constraints.txt $(PIP_ARGS) "$(TORCH_SPEC)" -e ./kernels -e ./clients -e '.[test,docs]'
	@touch "$@"

setup: $(STAMP) ## make the environment: .venv with the three distributions, editable

demo: $(STAMP) ## serve the shipped pair and show exactness and speed-up
	"$(BIN)/tlt" demo $(ARGS)

lint: $(STAMP) ## ruff, its format, mypy, import-linter
	"$(BIN)/ruff" check -q $(CODE)
	"$(BIN)/ruff" format -q --check $(CODE)
	"$(BIN)/mypy"
	"$(BIN)/lint-imports"

proto: $(STAMP) ## compile clients/proto again
	cd clients && "$(abspath $(BIN))/python" -m grpc_tools.protoc -Itlt_client/rpc=proto --python_out=. --pyi_out=. --grpc_python_out=. tlt_client/rpc/rollout.proto

tools: ## a Chromium and Prometheus for the tests: the machine's own, else Debian's
	@tests/tools.sh

# Compile the CPU kernels and the sources into their caches, which the first tests would do at once.
kernels: $(STAMP)
	@"$(BIN)/python" -m tests.first_start

check: $(STAMP) lint ## lint and the quick unit tests: under a minute, before each commit
	"$(BIN)/python" -m pytest tests/unit -m "not slow and not long and not soak and not gpu" $(PYTEST_ARGS) $(ARGS)

test: $(STAMP) tools ## lint, then at least one test of each behaviour that needs no GPU; what fails runs once more
	@$(MAKE) --no-print-directory -j 2 lint kernels
	"$(BIN)/python" -m tests.again -m "not gpu and not long and not soak" $(PYTEST_ARGS) $(ARGS)

test-long: $(STAMP) tools ## more cases of what `make test` shows: before a release, and after a change of what they test; adds Ray and other servers' routers to .venv (520 MB); renews benchmarks/results/test-long.json
	"$(BIN)/python" -m pip install -q -c constraints.txt $(PIP_ARGS) -e '.[fleet,routers]'
	"$(BIN)/python" -m benchmarks.record long $(PYTEST_ARGS) $(ARGS)

test-gpu: $(STAMP) ## on a machine with a GPU: its tests, the kernels' tests, exactness; renews benchmarks/results/test-gpu.json. GPUS=2: the tests of two GPUs, exactness over both
	"$(BIN)/python" -m benchmarks.record_tests --gpus "$(GPUS)" $(ARGS)

screenshots: $(STAMP) tools ## renew the pictures of the built-in page under docs/images
	"$(BIN)/python" -m examples.page.screenshots

bench: $(STAMP) ## exactness and rollout benchmarks, quick
	"$(BIN)/tlt" bench exact --quick $(ARGS)
	"$(BIN)/tlt" bench rollout --quick $(ARGS)

bench-gpu: $(STAMP) $(if $(filter 1,$(GPUS)),bench-one-gpu,bench-gpus) ## on a GPU: exactness first, then graphs, decode, prefill, cycle, rollout, kernels alone, pushes by ipc, with a pair padded to SHAPE; renews benchmarks/results and docs/performance.md. GPUS=2: exactness, exchange, decode, prefill, cycle, starts, faults, rollout and pushes over both
	"$(BIN)/python" -m benchmarks.report
	"$(BIN)/python" -m benchmarks.plot

padded: $(STAMP)
	@$(if $(filter 1 2 4 8,$(GPUS)),,$(error GPUS is "$(GPUS)"; use 1, 2, 4 or 8))
	test -f "$(PAIR)/drafter/config.json" || "$(BIN)/tlt" bench pad --shape "$(SHAPE)" --out "$(PAIR)" --device cuda

bench-one-gpu: padded
	"$(BIN)/tlt" bench exact $(ON_PAIR) --json "$(RESULTS)/exact-gpu.json"
	"$(BIN)/tlt" bench exact --device cuda --json "$(RESULTS)/exact-demo-gpu.json"
	"$(BIN)/tlt" bench exact --device cuda --numerics fast --json "$(RESULTS)/exact-fast-gpu.json"
	"$(BIN)/tlt" bench graphs $(ON_PAIR) # compiles what is missing, so that the next start is a warm one
	"$(BIN)/tlt" bench graphs $(ON_PAIR) --json "$(RESULTS)/graphs-gpu.json"
	"$(BIN)/python" -m benchmarks.record starts -- $(ON_PAIR)
	"$(BIN)/tlt" bench decode $(ON_PAIR) --against fast --context 16000 --json "$(RESULTS)/decode-gpu.json"
	"$(BIN)/tlt" bench prefill --json "$(RESULTS)/prefill-gpu.json"
	"$(BIN)/tlt" bench padded --pair "$(PAIR)" --json "$(RESULTS)/padded-gpu.json"
	"$(BIN)/tlt" bench cycle $(ON_PAIR) --context 16000 --json "$(RESULTS)/cycle-gpu.json"
	"$(BIN)/tlt" bench cycle --device cuda --json "$(RESULTS)/cycle-demo-gpu.json"
	"$(BIN)/tlt" bench cycle $(ON_PAIR) --batch 1,32 --capture --json "$(RESULTS)/capture-gpu.json"
	"$(BIN)/tlt" bench exact $(ON_PAIR) $(FP8) --json "$(RESULTS)/exact-fp8-gpu.json"
	"$(BIN)/tlt" bench exact --device cuda $(FP8) --drafter-quantization fp8 --json "$(RESULTS)/exact-demo-fp8-gpu.json"
	"$(BIN)/tlt" bench gemm $(FP8) --json "$(RESULTS)/gemm-fp8-gpu.json"
	"$(BIN)/tlt" bench decode $(ON_PAIR) $(FP8) --against none --against fast --json "$(RESULTS)/decode-fp8-gpu.json"
	"$(BIN)/tlt" bench cycle $(ON_PAIR) $(FP8) --json "$(RESULTS)/cycle-fp8-gpu.json"
	"$(BIN)/tlt" bench cycle $(ON_PAIR) $(FP8) --drafter-quantization fp8 --json "$(RESULTS)/cycle-fp8-drafter-gpu.json"
	"$(BIN)/tlt" bench decode $(ON_PAIR) --kv-cache-dtype fp8_e4m3 --batch 64 --prompt 4096 --against none --json "$(RESULTS)/decode-kv-fp8-gpu.json"
	"$(BIN)/tlt" bench rollout $(ON_PAIR) $(FP8) --workload 512 --policy goodput --policy off --json "$(RESULTS)/rollout-http-fp8-gpu.json"
	"$(BIN)/tlt" bench weights --device cuda --model "$(PAIR)/target" --channel ipc $(FP8) $(ARGS) --json "$(RESULTS)/weights-ipc-fp8-gpu.json"
	"$(BIN)/python" -m benchmarks.quality --device cuda --requests 128 --json "$(RESULTS)/quality-gpu.json"
	"$(BIN)/tlt" bench training --json "$(RESULTS)/training-gpu.json"
	"$(BIN)/tlt" bench interrupt $(ON_PAIR) --json "$(RESULTS)/interrupt-gpu.json"
	"$(BIN)/tlt" bench rollout $(ON_PAIR) --json "$(RESULTS)/rollout-http-gpu.json"
	"$(BIN)/tlt" bench rollout $(ON_PAIR) --penalties --workload 512 --policy goodput --json "$(RESULTS)/rollout-http-penalties-gpu.json"
	"$(BIN)/tlt" bench rollout $(ON_PAIR) $(foreach n,1 2 4 8 16 32 64 128 192 256,--workload "full $(n)") --policy goodput --policy off --json "$(RESULTS)/rollout-http-sweep-gpu.json"
	"$(BIN)/tlt" bench load $(ON_PAIR) --json "$(RESULTS)/load-gpu.json"
	test -f "$(HARD)/drafter/config.json" || "$(BIN)/tlt" bench pad --shape "$(SHAPE)" --out "$(HARD)" --device cuda --target benchmarks/pairs/hard/target --drafter benchmarks/pairs/hard/drafter
	"$(BIN)/tlt" bench rollout --pair hard --device cuda --model "$(HARD)/target" --drafter "$(HARD)/drafter" $(ARGS) --json "$(RESULTS)/rollout-http-hard-gpu.json"
	"$(BIN)/tlt" bench record $(ON_PAIR) --out "$(HARD)/rollout.safetensors"
	"$(BIN)/tlt" bench replay "$(HARD)/rollout.safetensors" --json "$(RESULTS)/replay-gpu.json"
	"$(BIN)/tlt" bench gemm --json "$(RESULTS)/gemm-gpu.json"
	"$(BIN)/tlt" bench weights --device cuda --model "$(PAIR)/target" --channel ipc $(ARGS) --json "$(RESULTS)/weights-ipc-gpu.json"

bench-gpus: padded
	"$(BIN)/tlt" bench exact $(ON_PAIR) $(OVER) --json "$(RESULTS)/exact$(WIDE)"
	"$(BIN)/tlt" bench exchange $(ARGS) --json "$(RESULTS)/exchange-gpu.json"
	"$(BIN)/tlt" bench decode $(ON_PAIR) $(OVER) --prefill --json "$(RESULTS)/decode$(WIDE)"
	"$(BIN)/tlt" bench decode --device cuda --shape llama-3.1-70b --batch 1 $(OVER) $(ARGS) --json "$(RESULTS)/decode-llama-3.1-70b-tp$(GPUS)-gpu.json"
	"$(BIN)/tlt" bench cycle $(ON_PAIR) $(OVER) --json "$(RESULTS)/cycle$(WIDE)"
	"$(BIN)/python" -m benchmarks.record starts --json "$(RESULTS)/starts$(WIDE)" -- $(ON_PAIR) $(OVER)
	"$(BIN)/python" -m benchmarks.record faults --json "$(RESULTS)/faults$(WIDE)" -- $(ON_PAIR) $(OVER)
	"$(BIN)/tlt" bench rollout $(ON_PAIR) $(OVER) --json "$(RESULTS)/rollout-http$(WIDE)"
	"$(BIN)/tlt" bench weights --device cuda --model "$(PAIR)/target" --channel ipc $(OVER) $(ARGS) --json "$(RESULTS)/weights-ipc$(WIDE)"

docs: $(STAMP) ## build the documentation site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict

lock: $(STAMP) ## the image's packages with their hashes, and the bill of materials; needs uv
	uv pip compile --quiet --generate-hashes --universal --python-version 3.12 --no-annotate --no-header \
	  $(addprefix --no-emit-package ,tlt-kernels tlt-client tlt-server) -c constraints.txt docker/requirements.in -o docker/requirements.lock
	"$(BIN)/python" docker/sbom.py

soak: $(STAMP) tools ## the long tests; renews benchmarks/results/soak.json
	"$(BIN)/python" -m benchmarks.record soak $(PYTEST_ARGS) $(ARGS)

clean: ## remove the environment and what tools left behind
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -maxdepth 2 -name '*.egg-info' -type d -prune -exec rm -rf {} +
