# The library and its programs, installed as the README's "Install" does; extras by --build-arg, as EXTRAS=gpu.
#
#   docker build -t txl_tf .
#   mkdir -p runs
#   docker run --rm --user "$(id -u)" -v "$PWD/runs:/work/runs" txl_tf txl-train --flagfile=/txl_tf/configs/quickstart.cfg
#
# With EXTRAS=cluster it is the image of Ray's head and workers: see deploy/README.md.
FROM python:3.11-slim

ARG EXTRAS=""
COPY . /txl_tf
RUN cd /txl_tf && pip install -q --no-cache-dir -e ".${EXTRAS:+[$EXTRAS]}"

RUN useradd --uid 1000 --home-dir /work --create-home txl
USER 1000
WORKDIR /work
CMD ["txl-train", "--help"]
