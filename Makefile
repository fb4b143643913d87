# `make demo` and `make test` are all a newcomer needs. PIP_ARGS passes options to pip.
PYTHON ?= python3
PIP_ARGS ?=
# `make test TORCH=2.15.0` takes another torch, in a venv of its own: see docs/compatibility.md.
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
CONSTRAINTS := $(if $(TORCH),build/constraints-torch-$(TORCH).txt,constraints.txt)
BIN := $(VENV)/bin
# Python keeps what it compiles, even if the environment forbids it: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS) $(PIP_ARGS)

.PHONY: demo test test-simulated-gpu gpu-check nightly test-browser-if-changed fast check site dist-test soak test-distributed bench bench-gpu lint types fmt proto check-proto ops docs picture clean test-monitoring test-browser screenshots

demo: $(VENV)/.server
	$(BIN)/backhaul demo --dashboard --json demo.json $(if $(SERVE),--serve)

# Four processes: tests wait for processes that they start, and each process of ours has a worker of its own.
test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal

# What a GPU runs, on a simulated one that needs none: see tests/support/simulated_cuda/README.md.
test-simulated-gpu: simulated-gpu
	$(SIMULATED) python -m pytest --numprocesses 2 tests/accelerators
	TEST_DEVICE=cuda $(SIMULATED) python -m pytest --numprocesses 2 -k 'telemetry or any_number or derivatives or autocast' \
		$(INTEGRATION_ON_ANY_DEVICE) $(addprefix tests/semantics/test_,derivatives.py autocast.py compiled_autocast.py)

# Builds the simulated device, if this machine can. CI does so on a core that the linters have left.
simulated-gpu: $(VENV)/.dev
	@$(SIMULATED) true
.PHONY: simulated-gpu

# Removes each wait for a device in turn: see tests/support/mutations.py.
mutations: $(VENV)/.dev
	$(SIMULATED) python -m support.mutations
.PHONY: mutations

# Tests that are written for the CPU and make all of their tensors on TEST_DEVICE.
SIMULATED = PYTHONPATH=tests $(BIN)/python -m support.simulated_cuda
INTEGRATION_ON_ANY_DEVICE := tests/integration/test_telemetry.py tests/integration/test_accumulation.py
ON_ANY_DEVICE := $(INTEGRATION_ON_ANY_DEVICE) tests/semantics \
	$(addprefix tests/faults/test_,ends_of_executions.py flips.py lies.py own_errors.py worker_dies.py)

# What only a GPU can tell, in at most 8 minutes, into gpu-results/: see tests/gpu_check/gpu-check.sh, which needs no make.
gpu-check: $(VENV)/.dev
	bash tests/gpu_check/gpu-check.sh --python $(abspath $(BIN))/python $(if $(DEVICE),--device $(DEVICE)) $(if $(ONLY),--only $(ONLY))

# All that CI leaves out because it takes long (about half an hour on two cores): before a release, and each night.
nightly: $(VENV)/.dev
	$(PIP) --quiet nvidia-cuda-nvrtc # compiles kernels for GPUs on a machine without one
	$(BIN)/python -m pytest -m nightly
	TEST_DEVICE=cuda $(SIMULATED) python -m pytest --numprocesses 2 $(ON_ANY_DEVICE)
	$(MAKE) test-simulated-gpu test-browser test-distributed dist-test

# Tests that take at most 0.25 s and start no worker process of their own. Those in tests/pure run with torch blocked.
fast: $(VENV)/.dev
	WITHOUT_TORCH=1 $(BIN)/python -m pytest --quiet --numprocesses $$(nproc) --dist loadfile \
		-m 'not slow and not soak and not nightly' tests/pure
	$(BIN)/python -m pytest --quiet --numprocesses $$(nproc) --dist loadfile -m 'not slow and not soak and not nightly' \
		tests/unit tests/contract tests/semantics

# What to run before each commit. It leaves out the comparison of generated stubs, which needs a venv of its own.
check: $(VENV)/.dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	@$(MAKE) --silent fast

# Debian's Prometheus reads our files and scrapes a dashboard. Where it is missing its package is unpacked, not installed:
# that would start a service.
PROMTOOL := build/prometheus/usr/bin/promtool
test-monitoring: $(VENV)/.dev
	@{ command -v prometheus && command -v promtool; } >/dev/null || $(MAKE) --silent $(PROMTOOL)
	$(BIN)/python -m pytest -m monitoring tests/monitoring

$(PROMTOOL):
	@command -v apt-get >/dev/null || { echo "no prometheus and promtool here: install Prometheus 2.42 or newer"; exit 1; }
	@if [ "$$(id -u)" = 0 ]; then apt-get update -qq; fi
	mkdir -p build/packages && cd build/packages && apt-get download -q -o APT::Sandbox::User=root prometheus
	dpkg-deb --extract build/packages/prometheus_*.deb build/prometheus

# Takes the machine's own Chromium, or that in BACKHAUL_CHROMIUM; root gets Debian's where there is none.
test-browser: $(VENV)/.dev
	@cd tests && $(abspath $(BIN))/python -m support.chromium --install
	$(BIN)/python -m pytest -m browser --numprocesses 2 --dist loadgroup tests/browser --ignore tests/browser/test_screenshots.py

# In CI: some of these tests, and all of them if the dashboard or what they use differs from where the branch left main,
# or on main from the commit before. Where the history is too short to tell, all of them run.
BASE ?= $(shell left=$$(git merge-base HEAD origin/main 2>/dev/null); \
	[ -n "$$left" ] && [ "$$left" != "$$(git rev-parse HEAD)" ] && echo $$left || echo HEAD~1)
DASHBOARD := server/backhaul_server/dashboard tests/browser \
	$(addprefix tests/support/,chromium.py dashboards.py pages.py prefix_proxy.py reporting.py shown.py)
SMOKE := tests/browser/test_parts.py tests/browser/test_prefix.py
test-browser-if-changed: $(VENV)/.dev
	@if git diff --quiet $(BASE) -- $(DASHBOARD); then \
		(cd tests && $(abspath $(BIN))/python -m support.chromium --install) && \
		$(BIN)/python -m pytest -m browser --numprocesses 2 --dist loadgroup $(SMOKE); \
	else $(MAKE) test-browser; fi

# The page's pictures in docs/images, from a training on this machine.
screenshots: $(VENV)/.dev
	$(BIN)/python -m pytest -m browser tests/browser/test_screenshots.py
	mkdir -p docs/images
	cp build/screenshots/dashboard-*.png docs/images/

# Trainers under torchrun, network namespaces and clusters: what takes too long, or too many processes, for every commit.
test-distributed: $(VENV)/.dev
	$(BIN)/python -m pytest -m distributed

# Each example in examples/integrations against the library that it is for, in an environment of its own: examples need
# versions that do not fit together. ONLY="diffusers timm" takes some of them. Plugins for pytest that libraries bring are not
# loaded: some are older than our pytest.
INTEGRATIONS := $(if $(ONLY),$(ONLY),$(basename $(notdir $(wildcard examples/integrations/requirements/*.txt))))
.PHONY: test-integrations $(INTEGRATIONS:%=test-integration-%)
test-integrations: $(INTEGRATIONS:%=test-integration-%)

$(INTEGRATIONS:%=test-integration-%): test-integration-%: .venv-integrations/%/.done
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 .venv-integrations/$*/bin/python -m pytest -p pytest_timeout -m libraries \
		tests/libraries/test_$*.py

.venv-integrations/%/.done: examples/integrations/requirements/%.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-integrations/$*
	grep '^torch==' constraints.txt > .venv-integrations/$*/constraints.txt
	.venv-integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		--constraint .venv-integrations/$*/constraints.txt --requirement $< --editable '.[server]' pytest pytest-timeout pytest-xdist
	@touch $@

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak

# Measures every figure on two cores and compares it with its limit (about 15 minutes). Keep the machine idle otherwise.
bench: $(VENV)/.dev .venv-hivemind/.done
	$(BIN)/backhaul bench --hivemind .venv-hivemind/bin/python --json bench.json $(if $(ONLY),--only $(ONLY))

# Measures the figures of training on a CUDA device that trainer and worker share (under 8 minutes).
bench-gpu: $(VENV)/.dev
	$(BIN)/backhaul bench --device cuda --json bench-gpu.json $(if $(ONLY),--only $(ONLY))

# One figure is compared with hivemind. If hivemind cannot be installed, the bench reports the figure as unavailable.
.venv-hivemind/.done:
	$(PYTHON) -m venv .venv-hivemind
	.venv-hivemind/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		$$(grep ^torch== constraints.txt) hivemind==1.1.12 && touch $@ || true

lint: $(VENV)/.dev check-proto
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

build/constraints-torch-%.txt: constraints.txt
	@mkdir -p build
	sed 's/^torch==.*/torch==$*/' $< > $@

# Not quiet: `make demo` is the first command of many, and torch is a large download.
$(VENV)/.server: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) --editable '.[server]'
	@touch $@

# Nothing is compiled here: most modules of the packages are never imported.
$(VENV)/.dev: pyproject.toml lab/pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) --quiet --no-compile --editable '.[server,dev]' --editable lab
	@touch $@ $(VENV)/.server

# Stubs need protobuf < 7 to be generated, the project itself runs on both: hence a venv of their own.
PROTOS := $(wildcard proto/backhaul_proto/v1/*.proto)
PROTOC = PATH="$(CURDIR)/.venv-proto/bin:$$PATH" .venv-proto/bin/python -m grpc_tools.protoc --proto_path proto \
	--python_out $(1) --grpc_python_out $(1) --mypy_out quiet:$(1) --mypy_grpc_out quiet:$(1) $(PROTOS)
proto: .venv-proto/.done
	$(call PROTOC,proto)

# The committed stubs are those that `make proto` would write.
check-proto: .venv-proto/.done
	rm -rf build/proto && mkdir -p build/proto
	$(call PROTOC,build/proto)
	for stub in $$(cd build/proto && find . -name '*_pb2*'); do diff -u proto/$$stub build/proto/$$stub || exit 1; done

# The positive list of ops, from torch's databases and the models of transformers (about 6 minutes).
ops: $(VENV)/.dev
	$(BIN)/python tests/contract/generate_ops.py

# docs/configuration.md and docs/calculator.html, from the code.
docs: $(VENV)/.dev
	$(BIN)/python tests/contract/generate_configuration.py
	$(BIN)/python tests/contract/generate_calculator.py

# The documentation as a site, in build/site. A warning is an error; tests/contract/test_site.py builds it too.
site: $(VENV)/.dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -b html -d build/doctrees docs build/site

# The wheel and the sdist, each in an empty environment that sees the packages of $(VENV) but not the project. A release
# runs the same script with what pip downloads, see .github/workflows/release.yml.
dist-test: $(VENV)/.dev
	PYTHON=$(abspath $(BIN))/python deploy/release/check.sh --borrow

# The README's picture, measured on this machine.
picture: $(VENV)/.dev
	$(BIN)/python lab/draw_memory.py

.venv-proto/.done:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		grpcio-tools==1.74.0 mypy-protobuf==5.1.0 setuptools==80.9.0
	@touch $@

# What docker-compose.yml runs, with labels that say of which commit it is.
image:
	docker build --tag backhaul --build-arg PIP_ARGS='$(PIP_ARGS)' --build-arg REVISION=$$(git rev-parse HEAD) \
		--build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) .

# Brings docker-compose.yml up, waits for its demo, looks at everything, takes it down. COMPOSE=podman-compose for
# another engine, COMPOSE_UP=--no-build for an image that is there.
compose-test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/compose/check_stack.py

.PHONY: image compose-test

clean:
	rm -rf .venv .venv-torch-* .venv-proto .venv-hivemind .venv-integrations build .mypy_cache .pytest_cache .ruff_cache .hypothesis
