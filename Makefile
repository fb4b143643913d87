# `make demo` and `make test` are all a newcomer needs. PIP_ARGS passes options to pip.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: demo test soak lint types fmt proto ops clean

demo: $(VENV)/.server
	$(BIN)/backhaul demo --dashboard --json demo.json $(if $(SERVE),--serve)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.server: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[server,dev]'
	touch $@ $(VENV)/.server

# Stubs need protobuf < 7 to be generated, the project itself runs on both: hence a venv of their own.
PROTO_DIR := proto/backhaul_proto/v1
proto: .venv-proto/.done
	PATH="$(CURDIR)/.venv-proto/bin:$$PATH" .venv-proto/bin/python -m grpc_tools.protoc --proto_path proto \
		--python_out proto --grpc_python_out proto --mypy_out proto --mypy_grpc_out proto \
		$(wildcard $(PROTO_DIR)/*.proto)

# The positive list of ops, from torch's databases and the models of transformers (about 6 minutes).
ops: $(VENV)/.dev
	$(PIP) --editable '.[ops]'
	$(BIN)/python tests/contract/generate_ops.py

.venv-proto/.done:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		grpcio-tools==1.74.0 mypy-protobuf==5.1.0 setuptools==80.9.0
	touch $@

clean:
	rm -rf $(VENV) .venv-proto .mypy_cache .pytest_cache .ruff_cache .hypothesis
