#!/usr/bin/env bash
# Installs the Debian packages that Ballast needs; does nothing where they are there already.
#
#   deploy/install-deps.sh            what building and the quickstart need
#   deploy/install-deps.sh --tests    also what deploy/test.sh needs
set -euo pipefail
# shellcheck source=deploy/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages=(
    build-essential cmake ninja-build pkg-config   # the build
    openmpi-bin libopenmpi-dev                     # launch and collectives
    libuv1-dev                                     # the daemon's loop
    libprotobuf-c-dev protobuf-c-compiler protobuf-compiler
    libjansson-dev                                 # JSON
    libdnnl-dev                                    # matrix products
    libhwloc-dev libxxhash-dev
    libcmocka-dev                                  # unit tests are part of the plain build
    bible-kjv bible-kjv-text                       # text to train on
)
for_tests=(clang libclang-rt-14-dev tmux procps python3 python3-protobuf)

case "${1:-}" in
    '') ;;
    --tests) packages+=("${for_tests[@]}") ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        warn "unknown argument '$1'; known: --tests"
        exit 2
        ;;
esac

command -v dpkg-query >/dev/null ||
    die "this is not Debian: please install the equivalents of ${packages[*]}, then build with cmake"

missing=()
for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] ||
        missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "all ${#packages[@]} packages are installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
        die "these packages are missing, and there is neither root nor sudo to install them: ${missing[*]}"
    as_root=(sudo)
fi
echo "installing ${#missing[@]} of ${#packages[@]} packages: ${missing[*]}"
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
        -o Dpkg::Use-Pty=0 "$@" </dev/null
}
mkdir -p build
{ apt update && apt install --no-install-recommends "${missing[@]}"; } >build/install.log 2>&1 || {
    tail -n 15 build/install.log >&2
    die "apt-get failed (all of its output is in build/install.log); is there a network and a Debian mirror?"
}
echo "installed"
