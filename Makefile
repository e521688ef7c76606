# Commands on a fresh machine: `make t5`, `make llm`, `make moe`, `make dpo`, `make test` and `make test-faults`. Everything is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
PYTHONS ?= python3.11 python3.12 python3.13
BIN := $(VENV)/bin
LAUNCH := $(BIN)/accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml
# On a terminal pip shows what it loads.
INSTALL := echo "Installing the pinned packages into $(VENV): a minute or two where the network is fast" && \
  $(BIN)/python -m pip install $$([ -t 2 ] || echo --quiet) --disable-pip-version-check -c constraints.txt
INSTALLED = @touch $@ && echo "Installed: $@"
PYTEST := $(BIN)/python -m pytest --dist loadfile --max-worker-restart 0
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

TRACKERS := tensorboard wandb trackio mlflow
READERS := lm-eval ctranslate2

.PHONY: t5 llm moe dpo test test-faults test-browser test-slurm test-versions test-container test-transformers4 $(TRACKERS:%=test-%) $(READERS:%=test-%) soak support families bench bench-growth gpu gpu-small check docs clean

t5: $(VENV)/.installed
	$(LAUNCH) recipes/t5.py --config recipes/configs/t5_functions.yaml

# A base from scratch; an adapter on it, frozen; the two merged, evaluated on the same rows; all in one table.
llm: $(VENV)/.installed
	$(LAUNCH) recipes/llm.py --config recipes/configs/llm_stdlib.yaml
	$(LAUNCH) recipes/llm.py --config recipes/configs/llm_functions.yaml
	$(LAUNCH) recipes/llm.py --config recipes/configs/llm_functions.yaml --run.name llm_functions_merged \
	  --model.name_or_path runs/llm_functions/merged --adapter.method none --export.merge false --train.max_steps 0 --optim.warmup_steps 0
	$(BIN)/python -m toolkit report --text runs/llm_stdlib runs/llm_functions runs/llm_functions_merged

# A small mixture of experts from scratch.
moe: $(VENV)/.installed
	$(LAUNCH) recipes/llm.py --config recipes/configs/llm_moe.yaml

# From the model of `make llm`, which comes first where it is missing: right lines beside the wrong ones that it has written.
dpo: $(VENV)/.installed runs/dpo_lines.jsonl
	$(LAUNCH) recipes/dpo.py --config recipes/configs/dpo_functions.yaml

runs/dpo_lines.jsonl: | runs/llm_functions/merged
	$(BIN)/python recipes/sources/pairs.py runs/dpo_rows.jsonl
	$(LAUNCH) -m toolkit generate runs/llm_functions/merged --file runs/dpo_rows.jsonl --column prompt --output $@.part
	mv $@.part $@

runs/llm_functions/merged:
	$(MAKE) llm

# The unit tests, a process for each core; then the tests that start ranks, three at a time: ranks that wait for each other leave
# cores idle. Those that measure GPUs run alone. All groups run, unless one is interrupted; each names at its end what failed. A
# process that crashes ends its group, with the test's name: pytest-xdist may wait for ever for the one that takes its place.
test: $(VENV)/.installed-test
	@failed=0; for group in "--numprocesses logical --maxprocesses 8 tests/unit" \
	  "--numprocesses 3 tests/recipes tests/distributed tests/families tests/trackers/test_tensorboard.py" "tests/gpu"; do \
	  $(PYTEST) $$group || failed=$$?; [ $$failed != 2 ] || break; \
	done; exit $$failed

# Kills, damaged files, full disks, signals, bad numbers, hangs, other process counts: 2 real processes each, two tests at a time.
test-faults: $(VENV)/.installed-test
	$(PYTEST) --numprocesses 2 tests/faults

# The pages of `report` and `preview` in Chromium, which is installed from the system's packages if it is not there.
test-browser: $(VENV)/.installed-browser
	@command -v chromium || { $(AS_ROOT) apt-get update && $(AS_ROOT) apt-get install --yes --no-install-recommends chromium; } || \
	  { echo "Chromium could not be installed: install it so that the command chromium starts it, then repeat make test-browser" >&2; exit 1; }
	$(BIN)/python -m pytest tests/browser

# docs/launch/slurm.sbatch under SLURM itself, on this machine, whose packages are installed if they are not there. As root; 8 minutes.
test-slurm: $(VENV)/.installed-test
	@command -v slurmd munged || { $(AS_ROOT) apt-get update && $(AS_ROOT) apt-get install --yes --no-install-recommends slurm-wlm munge; }
	$(AS_ROOT) $(BIN)/python -m pytest tests/slurm

# Unit tests and invariants at both ends of the version ranges, and on each of PYTHONS; uv keeps 15 GB of packages. Not in CI.
test-versions: $(VENV)/.installed
	@$(INSTALL) 'uv>=0.9'
	$(BIN)/python -m tests.versions $(PYTHONS)

# The Dockerfile's steps on a copy of the checkout, without Docker. As root on Debian; PyPI.
test-container: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/container

# A tracker's real package, offline: its own store is read back. `make test` has TensorBoard's already.
test-tensorboard test-wandb test-trackio test-mlflow: test-%: $(VENV)/.installed-%
	$(BIN)/python -m pytest tests/trackers/test_$*.py

# A tool that reads an export, offline: its log-likelihoods or its texts are ours. Not in CI.
test-lm-eval test-ctranslate2: test-%: $(VENV)/.installed-%
	$(BIN)/python -m pytest tests/other_tools/test_$(subst -,_,$*).py

# An export read by transformers 4.57, beside the version that wrote it: equal losses and tokens. Not in CI.
test-transformers4: $(VENV)/.installed-transformers4
	$(BIN)/python -m pytest tests/other_tools/test_transformers4.py

# 100 kills at random moments of one run, which must come out as if there had been none. Not in CI.
soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.faults.soak

# Every cell of docs/support.md, which this writes: families in full, with LoRA, in 4 bits, packed or not. 20 minutes; not in CI.
support: $(VENV)/.installed-test
	$(BIN)/python -m tests.families.table

# Every kind that transformers maps to a causal model or an encoder-decoder, in full, packed and with LoRA, on one process: the last
# table of docs/support.md. Hours on two cores; KINDS="bloom mamba" for some. Not in CI.
families: $(VENV)/.installed-test
	$(BIN)/python -m tests.families.survey $(KINDS)

# Ours beside the peers: one table in benchmarks/results/. Nothing else may run on the machine. Not in CI.
bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.bench

# What grows with rows, row length, processes, vocabulary and model. It takes long.
bench-growth: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.growth

# The parts of docs/gpu_first_run.md on the GPUs of this machine, ten minutes for one; or tiny, on a CPU. `make test` has the latter.
LOTS ?= first second
PARTS ?=
gpu gpu-small: $(VENV)/.installed-test $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.gpu $(if $(PARTS),--parts $(PARTS),--lots $(LOTS)) $(if $(filter gpu-small,$@),--small)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m benchmarks.presets.page accelerate_configs
	$(BIN)/python -m tests.english

# The pages as a site, build/docs/index.html: a broken link, or a page that stands nowhere in docs/conf.py, ends it.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --conf-dir docs --fresh-env --fail-on-warning --keep-going --quiet . build/docs
	ln -sf README.html build/docs/index.html

clean:
	rm -rf $(VENV) runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(INSTALL) -e .
	$(INSTALLED)

$(VENV)/.installed-test: $(VENV)/.installed
	@$(INSTALL) -e '.[test]'
	$(INSTALLED)

$(VENV)/.installed-browser: $(VENV)/.installed-test
	@$(INSTALL) -e '.[browser]'
	$(INSTALLED)

$(patsubst %,$(VENV)/.installed-%,$(TRACKERS) $(READERS) docs): $(VENV)/.installed-%: $(VENV)/.installed-test
	@$(INSTALL) -e '.[$*]'
	$(INSTALLED)

# Not into site-packages, where version 5 is.
$(VENV)/.installed-transformers4: $(VENV)/.installed-test
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/transformers4 --no-deps --upgrade \
	  'transformers==4.57.6' 'huggingface_hub<1' 'tokenizers<0.23'
	$(INSTALLED)

# trackio takes no pillow 13 yet, which nothing else here minds.
$(VENV)/.installed-trackio: private INSTALL := grep -v '^pillow==' constraints.txt >$(VENV)/trackio.txt && \
  $(subst constraints.txt,$(VENV)/trackio.txt,$(INSTALL))

$(VENV)/.installed-bench: $(VENV)/.installed
	@$(INSTALL) -e '.[bench]'
	$(INSTALLED)
