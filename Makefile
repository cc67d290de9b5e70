# Each target sets up what it needs, once; `make help` lists them.
PYTHON ?= python3
# `make test TORCH=2.11`: another version of PyTorch, in an environment of its own.
VENV ?= $(if $(TORCH),.venv-torch$(TORCH),.venv)
OTHER_TORCH = $(if $(TORCH),"torch==$(TORCH).*")
BIN := $(VENV)/bin
DALI_VENV := $(VENV)-dali
ORT_VENV := $(VENV)-ort
# A process for each core; the tests of a file share what they set up. What fails is named at once, by
# tests/failures_at_once.py, and the slowest at the end. pytest-xdist would wait for ever for the tests of a process
# that replaces one that has crashed.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart 0 --durations=15

help:
	@echo "make demo         train.py, one minute, on a folder of synthetic pictures"
	@echo "make demo-text    a small Transformer on synthetic texts"
	@echo "make demo-vit     a small Vision Transformer on synthetic pictures"
	@echo "make demo-tuning  tune settings on synthetic data: three minutes"
	@echo "make install-all  install everything, what the tests need included"
	@echo "make test         the fast tests"
	@echo "make slow         the slow ones"
	@echo "make test-dali    the tests of --loader dali"
	@echo "make test-ort     the tests of --engine ort"
	@echo "make test-browser the pages in a browser: needs Chromium (apt install chromium)"
	@echo "make kernels      the numerical tests with the kernels for older CPUs"
	@echo "make same         whether results are those of the last commit, or of REV=..."
	@echo "make soak         kills, lost nodes and random settings: up to two hours"
	@echo "make mutants      whether the tests notice small changes to the code"
	@echo "make lint         style, layers and types of the code"
	@echo "make bench        the toolkit against the usual loops: a quarter of an hour"
	@echo "make clean        remove what tests and tools cache"
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=FOLDER the virtual environment, TORCH=2.11 the PyTorch."

.PHONY: help install-all demo demo-text demo-vit demo-tuning test slow test-dali test-ort test-browser kernels soak same mutants bench lint clean
# Two installations into one environment would collide.
.NOTPARALLEL:

install-all: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/python benchmarks/demo_pictures.py data/demo_pictures
	HF_HUB_OFFLINE=1 $(BIN)/python train.py data/demo_pictures --time 1m

demo-text: $(VENV)/.installed
	$(BIN)/python transformer_test.py --config recipes/headlines_demo.yaml

demo-vit: $(VENV)/.installed
	$(BIN)/python vit_test.py --config recipes/vit_demo.yaml

# A search on texts, then one on pictures, both synthetic: three minutes on two CPU cores. A second
# time they are done already; `rm -r runs/demo-tuning-*` starts them anew.
demo-tuning: $(VENV)/.installed
	PYTHON=$(BIN)/python bash tuning/transformer_tuning.sh --dataset headlines --layers 2 --dim 128 \
		--heads 4 --ffn 256 --bs 64 --params lr,warmup_epochs,dropout --subset 0.5 --epochs 3 --trials 8 \
		--rungs 2 --reduction 2 --confirm 1 --output runs/demo-tuning-texts
	PYTHON=$(BIN)/python bash tuning/resnet50_tuning.sh --config recipes/shapes_demo.yaml --width 8 --bs 32 \
		--params lr,warmup_epochs --subset 1.0 --epochs 4 --trials 4 --no_prune --confirm 1 \
		--output runs/demo-tuning-pictures
	cat runs/demo-tuning-pictures/best.yaml

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# One of these tests may take as long as a hundred others: a process without work takes over another's. Those of
# one file build upon each other, and so run one after the other, beside the rest.
ONE_BY_ONE := tests/end_to_end/test_docs_as_run.py
slow: $(VENV)/.installed-dev
	@trap 'kill $$beside' INT TERM; \
	$(BIN)/python -m pytest --durations=15 $(ONE_BY_ONE) & beside=$$!; \
	$(PYTEST) --dist worksteal -m "slow" --ignore $(ONE_BY_ONE); code=$$?; \
	wait $$beside && exit $$code

# The tests of --loader dali, which need NVIDIA DALI but no GPU, in an environment of their own that
# adds it to the other one. `make test` and `make slow` leave them out.
test-dali: $(DALI_VENV)/.installed
	$(DALI_VENV)/bin/python -m pytest tests/dali

# The tests of --engine ort, which needs ONNX Runtime's training core, in an environment of their own:
# the onnxruntime of the other one has none. `make test` and `make slow` leave them out.
test-ort: $(ORT_VENV)/.installed
	$(ORT_VENV)/bin/python -m pytest tests/ort

# The pages of runs and comparisons in Chromium, which has to be installed. `make slow` skips them without it.
test-browser: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -r tests/browser/requirements.txt
	$(BIN)/python -m pytest tests/browser

# The numerical tests with the kernels that PyTorch and oneDNN take on older CPUs, which this one can
# run, too; `OTHER="--all"` for every one of them by itself.
kernels: $(VENV)/.installed-dev
	$(BIN)/python tests/other_kernels.py $(OTHER)

# Kills of a process at random moments, in runs and searches of all kinds, nodes that are lost, more
# models of timm, and settings drawn anew: up to two hours.
soak: $(VENV)/.installed-dev
	SOAK=$${SOAK:-100} $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/distributed/test_rank_faults.py \
		tests/distributed/test_node_faults.py tests/distributed/test_soak.py \
		tests/end_to_end/test_resume_all.py tests/end_to_end/test_signals.py \
		tests/end_to_end/test_vit_runs.py tests/end_to_end/test_make_demos.py \
		tests/tuning/test_tuning_kills.py tests/fused/test_compiled_kernels.py \
		tests/end_to_end/test_random_settings.py tests/end_to_end/test_random_text_settings.py

# Whether a change leaves results, files and messages as they are at a revision of git: the
# cases of tests/short_runs.py there and here, seven minutes; `ONLY="ngd resume"` for some of them.
same: $(VENV)/.installed-dev
	$(BIN)/python tests/same.py "$(or $(REV),HEAD)" $(ONLY)

# Small changes to the code that a test should notice, MUTANTS of them, drawn by SEED: an hour and a
# half on one core for 150. Stopped, it goes on where it was. `make mutants ARGS=--again` tries the
# survivors against more tests.
mutants: $(VENV)/.installed-mutants
	$(BIN)/python tests/mutants/run.py --number $${MUTANTS:-150} --seed $${SEED:-0} $(ARGS)

# The toolkit against the loops that people write, on this machine's CPU: a quarter of an hour.
# `make bench DATA=FOLDER` with train/<class>/ and test/<class>/ also trains to an accuracy on real
# pictures; on a GPU run benchmarks/gpu.py.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py --json runs/bench/cpu.json $(if $(DATA),--data_dir "$(DATA)")

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 2; }
	@# Without Debian's python3-venv this leaves a Python without pip, which must not count as made.
	@$(PYTHON) -m venv $(VENV) || { rm -f $(BIN)/python; \
		echo "error: there is no virtual environment in $(VENV): Debian and Ubuntu need \`apt install python3-venv\`"; exit 2; }

$(VENV)/.installed: requirements.txt | $(BIN)/python
	@echo "Installing requirements.txt into $(VENV): PyTorch is large, this takes a few minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt $(OTHER_TORCH)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements.txt | $(BIN)/python
	@echo "Installing requirements-dev.txt into $(VENV): PyTorch is large, this takes a few minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt $(OTHER_TORCH)
	@touch $@ $(VENV)/.installed

$(DALI_VENV)/.installed: tests/dali/requirements.txt requirements-dali.txt $(VENV)/.installed-dev
	$(BIN)/python -m venv $(DALI_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(DALI_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	$(DALI_VENV)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

# Its own packages come before those of the other environment, so this one has the onnxruntime with the
# training core.
$(ORT_VENV)/.installed: requirements-ort.txt $(VENV)/.installed-dev
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
		{ echo "error: --engine ort needs Python 3.11 or 3.12: make VENV=.venv3.12 PYTHON=python3.12 test-ort"; exit 2; }
	$(BIN)/python -m venv $(ORT_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(ORT_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	$(ORT_VENV)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.installed-mutants: tests/mutants/requirements.txt $(VENV)/.installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
