# One image serves as worker, dashboard and trainer. The command of a container selects its role, as in
# `docker run backhaul worker --help`. All three roles need the same packages (a worker runs what a trainer recorded,
# with the same torch), so a single image is built, scanned, pulled and upgraded, and versions cannot differ between
# roles. docs/containers.md describes how to run it.

FROM python:3.11-slim AS requirements
# The requirements are a file of their own, so that other changes to pyproject.toml keep the large layer below cached.
ARG EXTRAS=server,tls
COPY deploy/image/requirements.py pyproject.toml ./
RUN python requirements.py pyproject.toml "${EXTRAS}" > /requirements.txt


FROM python:3.11-slim AS dependencies
# An extra package index for torch. The default has CPU builds, which pip prefers because their version ends in "+cpu".
# Leave it empty to install torch from the ordinary index, whose Linux builds include CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# More options for pip, such as another index. They remain in the history of this stage, so do not put passwords here.
ARG PIP_ARGS=
COPY constraints.txt ./
COPY deploy/image/slim.py ./
COPY --from=requirements /requirements.txt ./
# Anything but nothing makes an image whose workers can compile: it keeps torch's headers, and has a compiler.
ARG COMPILES=
# The environment has no pip, because nothing is installed in a running container.
RUN python -m venv --without-pip /opt/backhaul \
    && pip --python /opt/backhaul/bin/python install --no-cache-dir --disable-pip-version-check \
        --constraint constraints.txt --requirement requirements.txt \
        ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ${PIP_ARGS} \
    && python slim.py /opt/backhaul ${COMPILES:+--for-compiling}


FROM dependencies AS project
# Pins the build dependencies of the wheel too.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_BUILD_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY proto proto
COPY runtime runtime
COPY client client
COPY server server
# Installed outside the environment, to be a layer of its own. Its scripts start the environment's interpreter.
RUN pip --python /opt/backhaul/bin/python install --no-cache-dir --disable-pip-version-check --no-deps \
        --prefix /opt/project ${PIP_ARGS} .


FROM python:3.11-slim
RUN groupadd --gid 10001 backhaul \
    && useradd --uid 10001 --gid backhaul --no-create-home --home-dir /var/lib/backhaul --shell /usr/sbin/nologin backhaul \
    # Mount points of volumes. A new volume takes the owner and mode of the directory that it covers.
    && install -d -o backhaul -g backhaul -m 0700 /var/lib/backhaul /run/backhaul/worker /run/backhaul/dashboard \
        /run/backhaul/certificates /run/backhaul/certificates/worker /run/backhaul/certificates/trainer \
        /run/backhaul/certificates/dashboard
ARG COMPILES=
RUN if [ -n "${COMPILES}" ]; then \
        apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ libpython3-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# Dependencies and project are separate layers, so an upgrade that changes no dependency pulls only the small one.
COPY --from=dependencies /opt/backhaul /opt/backhaul
COPY --from=project /opt/project /opt/backhaul
ENV PATH=/opt/backhaul/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib
# A number, because Kubernetes' runAsNonRoot cannot check a name.
USER 10001:10001
WORKDIR /var/lib/backhaul
EXPOSE 50051 8080
# Checks a worker. A dashboard is checked with `backhaul health http://127.0.0.1:8080`, as docker-compose.yml does.
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
