#!/usr/bin/env bash
# Compiles every header alone, with gcc and with clang, with the warnings of the build: what a
# header needs, it includes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for message in proto/*.proto; do
    protoc-c --proto_path=. --c_out="$scratch" "$message"
done

# As the build has them; read by both compilers from a file.
{
    printf '%s\n' -x c -std=gnu11 -fsyntax-only -D_GNU_SOURCE '-DBALLAST_VERSION=\"0\"' \
        '-DBALLAST_SOURCE_DIR=\".\"' -I. "-I$scratch" -Wall -Wextra -Wshadow -Wundef -Wconversion \
        -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wswitch-enum -Werror
    # A header alone need not use its own helpers, nor know the instruction set it is built for.
    printf '%s\n' -Wno-unused-function -Wno-psabi
    pkg-config --cflags libuv libprotobuf-c jansson hwloc libxxhash cmocka
    mpicc --showme:compile
} >"$scratch/flags"

check() { # FLAGS COMPILER HEADER
    printf '#include "%s"\ntypedef int used;\n' "$3" | "$2" "@$1" - || {
        echo "$3 does not compile alone with $2"
        return 1
    }
}
export -f check

find proto kernels worker daemon client tests -name '*.h' -not -path 'kernels/cuda/*' | sort |
    while read -r header; do
        for compiler in gcc clang; do printf '%s\0%s\0' "$compiler" "$header"; done
    done >"$scratch/jobs"
# shellcheck disable=SC2016
xargs -0 -n 2 -P "$(nproc)" bash -c 'check "$@"' check "$scratch/flags" <"$scratch/jobs" || exit 1
echo "$(tr -cd '\0' <"$scratch/jobs" | wc -c | awk '{print $1 / 4}') headers compile alone with gcc and clang"
