# shellcheck shell=bash
# Shared by the scripts of this folder; sourced, not run. Leaves the working directory at the
# repository's root, which every relative path of the scripts counts from.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ -t 1 ]; then bold=$'\e[1m' red=$'\e[31m' plain=$'\e[0m'; else bold='' red='' plain=''; fi

say() { printf '%s\n' "${bold}==> $*${plain}"; }
warn() { printf '%s\n' "${red}$*${plain}" >&2; }
die() {
    warn "$(basename "$0"): $*"
    exit 1
}

# The comment at the head of the script that is running.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "deploy/$(basename "$0")"; }

# Open MPI refuses root and more ranks than cores unless it is told otherwise, and kills 1 s after
# TERM, which is short for a save. It sleeps twice as long as this before it returns any exit code
# but 0, so more would make every failed run, even a mistyped setting, hang about.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_odls_base_sigkill_timeout=3

if command -v ccache >/dev/null && [ -n "${HOME:-}" ]; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache
fi

# build PRESET [TARGET...]: configure where that has not been done, then build what has changed.
build() {
    local preset=$1 folder=build/$1
    shift
    # CMake does not move with a checkout that was copied or renamed.
    if [ -f "$folder/CMakeCache.txt" ] &&
        ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$folder/CMakeCache.txt"; then
        echo "$folder belongs to another folder's sources: starting it afresh"
        rm -rf "$folder"
    fi
    if [ ! -f "$folder/build.ninja" ]; then
        cmake --preset "$preset" || return 1
    fi
    cmake --build --preset "$preset" --parallel "$(nproc)" ${1:+--target "$@"}
}
