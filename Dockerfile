# SPDX-License-Identifier: Apache-2.0
# An image with EPX's packages on a plain Debian; started without a command it runs the demo.
#
#   docker build -t epx .
#   docker run --rm epx
#   docker run --rm epx epx doctor
#   docker run --rm -v "$PWD:/out" epx epx bench sweep --report /out/report.html
#
# scripts/container.sh builds and runs it with docker, podman or buildah; scripts/dockerfile.py runs these lines without
# any of them, on bare Debians in folders.
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates git make
COPY . /epx
WORKDIR /epx
RUN make deb

FROM debian:bookworm-slim
COPY --from=build /epx/build-deb /packages
RUN apt-get update && rm -f /packages/*-dbgsym_*.deb && \
    apt-get install -y --no-install-recommends /packages/*.deb libfabric1 libsodium23 && \
    rm -rf /packages /var/lib/apt/lists/*
COPY scripts/demo.sh /usr/share/epx/demo.sh
CMD ["/usr/share/epx/demo.sh", "/usr/bin"]
