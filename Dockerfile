# One image for worker, dashboard and trainer: which of them a container is follows from its command, as in
# `docker run backhaul worker --help`. Not a target for each: all three need the same packages (a worker runs what a
# trainer recorded, with the same torch), so there is one thing to build, scan, pull and upgrade, and versions can't
# differ between them. docs/containers.md tells how to run it.

FROM python:3.11-slim AS requirements
# A file of its own: whatever else changes in pyproject.toml leaves the large layer below in the cache.
ARG EXTRAS=server
COPY deploy/image/requirements.py pyproject.toml ./
RUN python requirements.py pyproject.toml "${EXTRAS}" > /requirements.txt


FROM python:3.11-slim AS dependencies
# Where torch comes from, beside the ordinary index. The default has builds for CPUs, which pip prefers: the same
# version, made longer by "+cpu". Empty for the ordinary index's own, which for Linux brings CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# More options for pip, as for another index. They stay in this stage and its history: no passwords.
ARG PIP_ARGS=
COPY constraints.txt ./
COPY deploy/image/slim.py ./
COPY --from=requirements /requirements.txt ./
# Without pip: nothing is installed in a running container.
RUN python -m venv --without-pip /opt/backhaul \
    && pip --python /opt/backhaul/bin/python install --no-cache-dir --disable-pip-version-check \
        --constraint constraints.txt --requirement requirements.txt \
        ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ${PIP_ARGS} \
    && python slim.py /opt/backhaul


FROM dependencies AS project
# So that what builds the wheel is pinned too.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY proto proto
COPY runtime runtime
COPY client client
COPY server server
# Beside the environment, with scripts that start its interpreter.
RUN pip --python /opt/backhaul/bin/python install --no-cache-dir --disable-pip-version-check --no-deps \
        --prefix /opt/project ${PIP_ARGS} .


FROM python:3.11-slim
RUN groupadd --gid 10001 backhaul \
    && useradd --uid 10001 --gid backhaul --no-create-home --home-dir /var/lib/backhaul --shell /usr/sbin/nologin backhaul \
    # Where volumes go: a new volume takes owner and mode of the folder it covers.
    && install -d -o backhaul -g backhaul -m 0700 /var/lib/backhaul /run/backhaul/worker /run/backhaul/dashboard
# Dependencies and project are layers of their own: an upgrade that changes no dependency pulls the small one only.
COPY --from=dependencies /opt/backhaul /opt/backhaul
COPY --from=project /opt/project /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib
# By number: Kubernetes' runAsNonRoot can't check a name.
USER 10001:10001
WORKDIR /var/lib/backhaul
EXPOSE 50051 8080
# A worker's. A dashboard is asked by `backhaul health http://127.0.0.1:8080`, as in docker-compose.yml; a trainer is not.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["backhaul", "health", "127.0.0.1:50051", "--timeout", "3"]
ENTRYPOINT ["backhaul"]
CMD ["--help"]
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="Backhaul" \
      org.opencontainers.image.description="Activation checkpointing for PyTorch that recomputes on another machine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
