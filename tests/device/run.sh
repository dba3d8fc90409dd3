#!/usr/bin/env bash
# Everything that wants a GPU, in one run of at most eight minutes: builds for the GPU that is
# there, compares every operation with the CPU device, trains, switches, measures, and prints
# one table. Fetches nothing and needs no root. README.md says how to read the table.
#
#   tests/device/run.sh [OPTION...]
#     --dry            the same script on the stand-in, with tiny models; needs no GPU
#     --build DIR      build in DIR, which may be there; default build/device, with --dry
#                      build/release
#     --no-build       take the programs in DIR as they are
#     --budget S       seconds for everything, building too; default 480
#     --stages A,B     only these stages
#     --results DIR    where table and log go; default tests/device/results, with --dry
#                      build/device-dry
#
# Libraries that the machine lacks are taken from .deps/, see fetch-debs.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' tests/device/run.sh; }
die() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 2
}

command_line="$*"
dry='' build_dir='' build=yes budget=480 stages='' results=''
while [ $# -gt 0 ]; do
    case "$1" in
        --dry) dry=yes ;;
        --no-build) build='' ;;
        --build | --budget | --stages | --results)
            [ $# -ge 2 ] || die "$1 wants a value"
            case "$1" in
                --build) build_dir=$2 ;;
                --budget) budget=$2 ;;
                --stages) stages=$2 ;;
                --results) results=$2 ;;
            esac
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die "unknown argument '$1'; --help tells the known ones" ;;
    esac
    shift
done
[[ "$budget" =~ ^[1-9][0-9]*$ ]] || die "--budget wants a number of seconds, not '$budget'"
if [ -z "$build_dir" ]; then
    build_dir=build/device
    [ -z "$dry" ] || build_dir=build/release
fi
if [ -z "$results" ]; then
    results=tests/device/results
    [ -z "$dry" ] || results=build/device-dry
fi

# What a field of nvidia-smi says of the first GPU; nothing where there is none.
gpu_field() {
    nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1 || true
}

gpu=stand-in
[ -n "$dry" ] || gpu=$(gpu_field name | tr -cs '[:alnum:]' '-' | tr '[:upper:]' '[:lower:]')
gpu=${gpu%-}
stem=$results/$(date +%F)-${gpu:-no-gpu}
mkdir -p "$results"
log=$stem.log
exec > >(tee "$log") 2>&1
tee_pid=$!

# ---- libraries of our own ----

# Debian packages unpacked without root; everything that looks for them is told where they are. Of
# their shared libraries only those are used that the machine lacks: its own programs go on with
# its own.
use_deps() {
    local root=$PWD/.deps/root deb link target library triplet lib ldconfig
    compgen -G '.deps/*.deb' >/dev/null || [ -d "$root" ] || return 0
    triplet=$(uname -m)-linux-gnu
    lib=$root/usr/lib/$triplet
    if [ ! -f "$root/.unpacked" ]; then
        for deb in .deps/*.deb; do
            dpkg -x "$deb" "$root" || die "cannot unpack $deb"
        done
        # Absolute links of the packages point outside; the alternatives system does not run.
        find "$root" -type l -lname '/*' | while read -r link; do
            target=$root$(readlink "$link")
            if [ -e "$target" ]; then ln -sfn "$target" "$link"; fi
        done
        for link in mpirun mpicc; do
            if [ -e "$root/usr/bin/$link.openmpi" ]; then
                ln -sfn "$link.openmpi" "$root/usr/bin/$link"
            fi
        done
        mkdir -p "$root/lacking"
        # ldconfig is not on the path of every user.
        ldconfig=$(PATH=$PATH:/sbin:/usr/sbin command -v ldconfig || echo false)
        for library in "$lib"/*.so.* "$root/lib/$triplet"/*.so.* "$lib"/openmpi/lib/*.so.*; do
            [ -e "$library" ] || continue
            if ! "$ldconfig" -p | grep -qF "$(basename "$library") "; then
                ln -sfn "$library" "$root/lacking/"
            fi
        done
        touch "$root/.unpacked"
    fi
    export PATH=$PATH:$root/usr/bin
    export LD_LIBRARY_PATH=$root/lacking${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export C_INCLUDE_PATH=$root/usr/include:$root/usr/include/$triplet
    export PKG_CONFIG_PATH=$lib/pkgconfig:$root/usr/share/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
    export CMAKE_PREFIX_PATH=$root/usr CMAKE_LIBRARY_PATH=$lib CMAKE_INCLUDE_PATH=$root/usr/include
    if [[ $(command -v mpirun) == "$root"/* ]]; then
        export OPAL_PREFIX=$root/usr OPAL_DATADIR=$root/usr/share OPAL_SYSCONFDIR=$root/etc/openmpi
        export PMIX_INSTALL_PREFIX=$lib/pmix2 PMIX_PREFIX=$lib/pmix2
        export PMIX_MCA_pcompress_base_silence_warning=1
    fi
    echo "libraries: $(find .deps -maxdepth 1 -name '*.deb' | wc -l) packages of .deps," \
        "$(find "$root/lacking" -type l | wc -l) shared libraries that the machine lacks"
}

# -DNAME=PATH for the parts of CUDA that a machine has only inside Python packages.
cuda_from_wheels() {
    python3 - <<'EOF_PYTHON'
import glob, os, sys
folders = [os.path.join(path, "nvidia") for path in sys.path if path]
cuda = "/usr/local/cuda"
for name, there, pattern in (
        ("CUDA_INCLUDE_DIR", "include/cublasLt.h", "*/include/cublasLt.h"),
        ("NCCL_INCLUDE_DIR", "include/nccl.h", "nccl/include/nccl.h"),
        ("CUDA_cudart", "lib64/libcudart.so", "*/lib/libcudart.so*"),
        ("CUDA_cublasLt", "lib64/libcublasLt.so", "*/lib/libcublasLt.so*"),
        ("CUDA_nccl", "lib64/libnccl.so*", "nccl/lib/libnccl.so*")):
    if glob.glob(os.path.join(cuda, there)) or glob.glob("/usr/*/" + os.path.basename(there)) or (
            glob.glob("/usr/lib/*/" + os.path.basename(there))):
        continue
    found = [path for folder in folders for path in glob.glob(os.path.join(folder, pattern))]
    if found:
        print("-D%s=%s" % (name, os.path.dirname(found[0]) if "INCLUDE" in name else found[0]))
EOF_PYTHON
}

# ---- the build ----

build_all() {
    local targets=(ballast-worker ballastd ballastctl device_ops)
    local settings=(-DCMAKE_BUILD_TYPE=Release) architecture
    if [ -n "$dry" ]; then
        targets+=(ballast-cuda-standin)
    else
        architecture=$(gpu_field compute_cap | tr -d '. ')
        [ -n "$architecture" ] || {
            echo "nvidia-smi tells no compute capability: is there a GPU?"
            return 1
        }
        targets+=(ballast-cuda)
        settings+=(-DBALLAST_CUDA=ON "-DBALLAST_CUDA_ARCHITECTURES=$architecture")
        mapfile -t -O ${#settings[@]} settings < <(cuda_from_wheels)
    fi
    if [ -f "$build_dir/CMakeCache.txt" ] &&
        ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$build_dir/CMakeCache.txt"; then
        # CMake does not move with a checkout that was copied.
        [[ $build_dir == build/* ]] || {
            echo "$build_dir belongs to another folder's sources"
            return 1
        }
        rm -rf "$build_dir"
    fi
    if [ ! -f "$build_dir/build.ninja" ] || [ -z "$dry" ]; then
        cmake -S . -B "$build_dir" -G Ninja "${settings[@]}" >"$build_dir.cmake.log" 2>&1 || {
            tail -n 20 "$build_dir.cmake.log"
            return 1
        }
    fi
    timeout -k 5 $((budget * 2 / 3)) cmake --build "$build_dir" --parallel "$(nproc)" \
        --target "${targets[@]}" >"$build_dir.log" 2>&1 || {
        grep -E 'error|FAILED|undefined' "$build_dir.log" | head -n 20
        tail -n 5 "$build_dir.log"
        return 1
    }
}

use_deps
built='as it was'
if [ -n "$build" ]; then
    echo "==> build in $build_dir"
    mkdir -p "$(dirname "$build_dir")"
    if build_all; then built="$SECONDS s"; else built="!failed after $SECONDS s"; fi
fi
bin=$build_dir/bin
for program in ballast-worker ballastd ballastctl device_ops; do
    [[ -x $bin/$program || $built == !* ]] || built="!no $bin/$program: build it, or leave out --no-build"
done

# ---- the stages ----

export BALLAST_BIN=$bin
options=(--budget "$budget" --used "$SECONDS" --build "$built" --stages "$stages" --results "$stem.md"
    --command "$command_line")
if [ -n "$dry" ]; then
    options+=(--dry)
    BALLAST_CUDA_LIBRARY=$PWD/$bin/libballast-cuda-standin.so
    [[ $build_dir != /* ]] || BALLAST_CUDA_LIBRARY=$bin/libballast-cuda-standin.so
    export BALLAST_CUDA_LIBRARY
fi
timeout -k 20 $((budget > SECONDS ? budget - SECONDS + 20 : 20)) \
    python3 -u tests/device/stages.py "${options[@]}" &
child=$!
trap 'kill -TERM $child 2>/dev/null || true' INT TERM # it ends its runs and prints what there is
code=0
wait $child || code=$?
while kill -0 $child 2>/dev/null; do # a signal ended the wait, not the child
    code=0
    wait $child || code=$?
done
[ $code -ne 124 ] || echo "the whole was ended after $SECONDS s"
echo "log: $log"
exec >&- 2>&-
wait "$tee_pid" || true
exit $code
