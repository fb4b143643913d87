# One image for worker, dashboard and trainer: what it is follows from the command.
FROM python:3.11-slim AS build

# The CPU build of torch; leave it empty for PyPI's own, which brings CUDA.
ARG PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

WORKDIR /src
RUN python -m venv /opt/backhaul
# Dependencies change less often than the project: a layer of their own.
COPY pyproject.toml constraints.txt LICENSE README.md ./
RUN mkdir -p proto/backhaul_proto runtime/backhaul_runtime client/backhaul server/backhaul_server \
    && /opt/backhaul/bin/pip install --no-cache-dir --constraint constraints.txt ${PIP_ARGS} '.[server]'
COPY proto proto
COPY runtime runtime
COPY client client
COPY server server
RUN /opt/backhaul/bin/pip install --no-cache-dir --constraint constraints.txt ${PIP_ARGS} --force-reinstall --no-deps .

FROM python:3.11-slim

RUN useradd --uid 10001 --create-home backhaul
COPY --from=build /opt/backhaul /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH PYTHONUNBUFFERED=1
USER backhaul
WORKDIR /home/backhaul
EXPOSE 50051 8080
ENTRYPOINT ["backhaul"]
CMD ["--help"]
