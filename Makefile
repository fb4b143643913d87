# `make demo` and `make test` are all a newcomer needs. PIP_ARGS passes options to pip.
PYTHON ?= python3
PIP_ARGS ?=
# `make test TORCH=2.15.0` takes another torch, in a venv of its own: see docs/compatibility.md.
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
CONSTRAINTS := $(if $(TORCH),build/constraints-torch-$(TORCH).txt,constraints.txt)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(PIP_ARGS)

.PHONY: demo test soak bench lint types fmt proto check-proto ops picture clean

demo: $(VENV)/.server
	$(BIN)/backhaul demo --dashboard --json demo.json $(if $(SERVE),--serve)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak

# Every figure beside its limit, on two cores (under 15 minutes). Let the machine do nothing else.
bench: $(VENV)/.dev .venv-hivemind/.done
	$(BIN)/backhaul bench --hivemind .venv-hivemind/bin/python --json bench.json $(if $(ONLY),--only $(ONLY))

# One figure is beside hivemind. Where it can't be installed the bench says so.
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

$(VENV)/.server: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) --editable '.[server]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) --editable '.[server,dev]'
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

# The README's picture, measured on this machine.
picture: $(VENV)/.dev
	$(PIP) --editable '.[picture]'
	$(BIN)/python benchmarks/draw_memory.py

.venv-proto/.done:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		grpcio-tools==1.74.0 mypy-protobuf==5.1.0 setuptools==80.9.0
	@touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-proto .venv-hivemind build .mypy_cache .pytest_cache .ruff_cache .hypothesis
