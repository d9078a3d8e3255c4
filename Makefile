# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs in .venv; a fresh clone needs Python 3.11 or newer, gcc and pip.

# The system's Python before others: distributions compile theirs with all optimisations, pyenv by default without, and
# that is a third of the server's speed. `make PYTHON=...` takes another.
PYTHON ?= $(firstword $(shell for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done) python3)
VENV := .venv
BIN := $(VENV)/bin

ORDER ?= file
RETRY ?=
PLATFORMS ?= platforms node
FUZZ_SECONDS ?= 300
SOAK_SECONDS ?= 3600

.PHONY: help install serve docs docs-serve test test-all test-slow test-platforms test-ray install-platforms check check-types check-rest coverage bench fuzz soak chaos lock audit release protos clean

help:
	@echo "make install         .venv with the headrace command, ONNX Runtime and tracing"
	@echo "make serve           serve the example models on localhost:8000 (HTTP) and :8001 (gRPC)"
	@echo "make docs            build the documentation site into build/site; broken links fail it"
	@echo "make docs-serve      the same, and serve it on http://127.0.0.1:8090"
	@echo "make test            lint, types and the quick tests: ten minutes on two cores (TESTS=tests/net for some, ORDER=random)"
	@echo "make test-all        make test, then the slow tests: every test that needs no system package"
	@echo "make test-platforms  tests that need Debian packages (installs them)"
	@echo "make test-ray        tests on a real Ray cluster of two nodes (installs Ray in build/ray), a quarter of an hour"
	@echo "make check           lint, types, import rules, forbidden calls, generated files"
	@echo "make coverage        line and branch coverage of the quick tests, and of all (an hour)"
	@echo "make bench           measure Headrace beside its peers (installs them), about forty minutes"
	@echo "make fuzz            send malformed input to every parser and server, FUZZ_SECONDS=300 for each target"
	@echo "make soak            an hour of mixed traffic on a real server; growth fails it (SOAK_SECONDS=3600)"
	@echo "make chaos           count the outcome of 100,000 requests while workers are killed, stopped and reloaded"
	@echo "make lock            update requirements/*.lock: every version with its hashes"
	@echo "make audit           known vulnerabilities of our dependencies (asks PyPI)"
	@echo "make release         sdist and wheel twice, the same bytes; checksums, SBOM; signed with RELEASE_KEY=..."
	@echo "make protos          compile proto/ again"

# Made again when the dependencies change. virtualenv steps in where Debian's python3-venv is not installed.
$(VENV)/.installed: pyproject.toml scripts/make_venv.sh
	bash scripts/make_venv.sh $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[onnx,examples,trace,plot]'
	touch $@

# Test dependencies, among them TensorFlow and PyTorch: a gigabyte and a half that serving does not need.
# With the versions of the lock, so that a new release of a dependency does not change the test results.
$(VENV)/.testing: $(VENV)/.installed requirements/test.lock
	$(BIN)/python scripts/lock.py --constraints $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[all,test,check]' --constraint $(VENV)/constraints.txt
	touch $@

install: $(VENV)/.installed
	@$(BIN)/headrace --version

serve: $(VENV)/.installed
	$(BIN)/python examples/make_models.py build/models
	$(BIN)/headrace serve build/models

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python scripts/build_docs.py build/site

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8090

test: $(VENV)/.testing
	$(BIN)/python scripts/run_tests.py --order $(ORDER) $(if $(RETRY),--retry) check quick -- $(TESTS)

test-all: $(VENV)/.testing
	$(BIN)/python scripts/run_tests.py --order $(ORDER) check quick slow -- $(TESTS)

test-slow: $(VENV)/.testing
	$(BIN)/python scripts/run_tests.py $(if $(RETRY),--retry) slow -- $(TESTS)

test-platforms: $(VENV)/.testing install-platforms
	$(BIN)/python scripts/run_tests.py $(if $(RETRY),--retry) $(PLATFORMS) -- $(TESTS)

test-ray: $(VENV)/.testing
	bash scripts/install_ray.sh
	$(BIN)/python scripts/run_tests.py --workers 1 ray -- $(TESTS)

install-platforms:
	bash scripts/install_platform_packages.sh
	for platform in scripts/platforms/*.sh; do bash $$platform install || exit 1; done

coverage: $(VENV)/.testing
	$(BIN)/python scripts/run_tests.py --coverage quick slow -- $(TESTS)

# Type checking takes as long as all other checks, so the two run in parallel.
check: $(VENV)/.testing
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-rest

check-types:
	$(BIN)/mypy

check-rest:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_forbidden.py
	$(BIN)/python scripts/compile_protos.py --check
	$(BIN)/python scripts/generate_crds.py --check
	$(BIN)/python scripts/generate_chart.py --check
	$(BIN)/python scripts/generate_dashboards.py --check
	$(BIN)/python scripts/generate_reference.py --check
	$(BIN)/python scripts/generate_code_reference.py --check
	$(BIN)/python scripts/draw_architecture.py --check

bench: $(VENV)/.testing
	$(BIN)/python -m bench

# libFuzzer is faster and reaches more code. It has wheels for x86-64; elsewhere `fuzz/guided.py` is used.
fuzz: $(VENV)/.testing
	-$(BIN)/python -m pip install --quiet --only-binary :all: 'atheris>=3.0'
	$(BIN)/python -m fuzz all --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m pytest -m "hypothesis and not platform" --hypothesis-profile=explore

soak: $(VENV)/.testing
	$(BIN)/python -m soak --seconds $(SOAK_SECONDS)

chaos: $(VENV)/.testing
	HEADRACE_CHAOS_REQUESTS=100000 $(BIN)/python -m pytest tests/chaos/test_every_request.py -s

lock: $(VENV)/.testing
	$(BIN)/python scripts/lock.py
	$(BIN)/python scripts/list_licences.py

audit: $(VENV)/.testing
	$(BIN)/python scripts/audit.py

release: $(VENV)/.testing
	$(BIN)/python scripts/release.py dist $(if $(RELEASE_KEY),--key $(RELEASE_KEY))

protos: $(VENV)/.testing
	$(BIN)/python scripts/compile_protos.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
