# make demo   everything from a fresh clone to a first result
# make test   lint, types and the whole test suite
# make bench  the benchmarks, ratios in one table at the end
# make bench-peers  other federated-learning frameworks on the same work
# make fuzz   20,000 generated inputs; none may end in a traceback or a hang
# make torture  1,000 kills and other disturbances; every run must end with the same result
# make docs   the tables and figures of README and docs, from the files in results/
# make lint   ruff and mypy alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers

.PHONY: setup demo test suite bench bench-peers fuzz torture docs lint format types clean

setup: $(READY)

# Only files whose hashes are in the lock file.
$(READY): requirements.lock pyproject.toml deploy/install.sh
	$(PYTHON) -m venv $(VENV)
	sh deploy/install.sh $(BIN)/pip
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	$(BIN)/fedseal train demo --baseline --out runs/demo --resume

lint: format types

format: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Many tests wait for processes, so types are checked meanwhile.
test: format
	@$(MAKE) --no-print-directory -j 2 types suite

suite: setup
	$(BIN)/fedseal data get fashion-mnist
	@command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q chromium) >/dev/null 2>&1 \
	  || echo "There is no chromium, and apt could not install it: reports are not looked at in a browser."
	$(BIN)/pytest -n 4 --dist worksteal

bench: setup
	$(BIN)/fedseal data get fashion-mnist
	$(BIN)/python -m bench

fuzz: setup
	$(BIN)/python tests/fuzz/fuzzing.py --inputs 10000 --out results/bench/fuzz.json
	$(BIN)/python tests/fuzz/packets.py --inputs 10000 --out results/bench/fuzz-packets.json
	$(BIN)/python -m bench.page

torture: setup
	$(BIN)/fedseal data get fashion-mnist
	$(BIN)/python tests/torture/torture.py --kills 1000 --out results/bench/torture.json
	$(BIN)/python tests/torture/serving_memory.py --rounds 500 --out results/bench/serving-memory.json
	$(BIN)/python -m bench.page

docs: setup
	$(BIN)/python -m fedseal.reproduce.docs
	$(BIN)/python -m bench.page

# The frameworks see the packages of the first environment, so that all contestants use the same PyTorch.
$(PEERS)/.ready: bench/peers/requirements.txt | setup
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > $$(echo $(PEERS)/lib/*/site-packages)/shared.pth
	$(PEERS)/bin/pip install -q --no-deps -r bench/peers/requirements.txt
	@touch $@

bench-peers: setup $(PEERS)/.ready
	$(BIN)/fedseal data get fashion-mnist
	$(BIN)/python -m bench.peers

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
