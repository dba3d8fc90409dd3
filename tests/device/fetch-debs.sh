#!/usr/bin/env bash
# Downloads into .deps/ the packages that building and running need, with all they depend on, so
# that run.sh can unpack them on a machine that has no network and where nothing can be
# installed. Needs apt with its lists (apt-get update) and a network, no root.
#
#   tests/device/fetch-debs.sh [--list] [PACKAGE...]
#
# --list only names the packages. Take the distribution of that machine or an older one: programs of
# an older C library run beside a newer one, not the other way round. cmake and ninja-build have to be
# named where that machine has none; python3, a C and a C++ compiler and CUDA must be there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

wanted=(openmpi-bin libopenmpi-dev libuv1-dev libprotobuf-c-dev protobuf-c-compiler libjansson-dev
    libdnnl-dev libhwloc-dev libxxhash-dev libcmocka-dev pkg-config)
list=''
if [ "${1:-}" = --list ]; then
    list=yes
    shift
fi
wanted+=("$@")

# What must come from the machine itself (a second C library beside the loader's would break every
# program), what runs only when packages are installed, and what a Fortran or LTO user needs.
from_the_machine() {
    grep -vE '^(libc6|libc6-dev|libc-dev-bin|linux-libc-dev|libcrypt1|libcrypt-dev|libgcc-.*|libstdc.*)$' |
        grep -vE '^(gcc|g[+][+]|cpp|gfortran|libgfortran|libquadmath|lib(a|l|t|ub|hwa)san|libgomp1)' |
        grep -vE '^(libatomic1|libitm1|libcc1|libisl|libmpc3|libmpfr6|libgmp10|libctf|libgprofng)' |
        grep -vE '^(binutils|libbinutils|perl|libperl|lib.*-perl|debconf|dpkg|debianutils|tar|passwd)' |
        grep -vE '^(adduser|init-system-helpers|usrmerge|procps|libproc2|libpam|libaudit|libcap)' |
        grep -vE '^(autoconf|automake|autotools|m4|libltdl-dev|libjs-|openssh-|libgdbm|libdb5|rpcsvc)' |
        grep -vE '^(libsemanage|libsepol|libselinux1|libtirpc-dev|libnsl-dev|libx11|libxcb|libxau|libxdmcp)' |
        grep -vE '^(libxext6|libxnvctrl0|libhwloc-plugins|libfido|libcbor|libedit|libmd0|libbsd0)'
}

# What apt would install on a machine with nothing at all.
status=$(mktemp)
trap 'rm -f "$status"' EXIT
answer=$(apt-get -s install --no-install-recommends -o "Dir::State::status=$status" \
    -o Dir::State::extended_states=/dev/null "${wanted[@]}" 2>&1) || {
    printf '%s\n' "$answer" | tail -n 5 >&2
    echo "apt-get cannot resolve these packages; are its lists there (apt-get update)?" >&2
    exit 1
}
mapfile -t needed < <(awk '$1 == "Inst" { print $2 }' <<<"$answer" | from_the_machine | sort -u)
if [ -n "$list" ]; then
    printf '%s\n' "${needed[@]}"
    exit 0
fi
mkdir -p .deps
cd .deps
rm -rf root
missing=()
for package in "${needed[@]}"; do
    compgen -G "${package}_*.deb" >/dev/null || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    apt-get -qq download "${missing[@]}" || {
        echo "not all could be downloaded: ${missing[*]}" >&2
        exit 1
    }
fi
echo "$(find . -maxdepth 1 -name '*.deb' | wc -l) packages in .deps, $(du -sh . | cut -f1)"
