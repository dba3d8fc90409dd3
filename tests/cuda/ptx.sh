#!/usr/bin/env bash
# What nvcc makes of the attention kernels: the PTX multiplies on tensor cores and copies
# asynchronously, and no kernel that training spends its time in spills registers.
# usage: ptx.sh [ARCH ...]   (default sm_80 sm_90)
# Exits 77, which means skipped, where there is no nvcc.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
nvcc=$(command -v nvcc || true)
if [ -z "$nvcc" ] && [ -x /usr/local/cuda/bin/nvcc ]; then
    nvcc=/usr/local/cuda/bin/nvcc
fi
if [ -z "$nvcc" ]; then
    echo "no nvcc on PATH or in /usr/local/cuda/bin: skipped"
    exit 77
fi
if [ $# -eq 0 ]; then
    set -- sm_80 sm_90
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

complain() {
    echo "FAILED: $*"
    failed=1
}

# Kernel names as nvcc mangles them: name, head dimension, what else the template takes.
tensor_core='_Z[0-9]*attention_(forward_kernel|backward_queries|backward_keys)ILi[0-9]+'
hot='_Z[0-9]*attention_(forward_kernel|backward_queries|backward_keys)ILi(64|128)E'

# PTX file -> "kernel mma copies" a line.
count_instructions() {
    awk '/\.entry / { match($0, /_Z[A-Za-z0-9_]*/)
             name = substr($0, RSTART, RLENGTH); mma[name] = copies[name] = 0 }
         /mma\.sync/ { mma[name]++ }
         /cp\.async\.cg/ { copies[name]++ }
         END { for (name in mma) print name, mma[name], copies[name] }' "$1"
}

# Output of ptxas -v -> "kernel registers spilled" a line; spilled is stores plus loads in bytes.
count_registers() {
    awk '/Compiling entry function/ { match($0, /_Z[A-Za-z0-9_]*/)
             name = substr($0, RSTART, RLENGTH) }
         /bytes spill stores/ { for (i = 1; i < NF; i++)
                 if ($i == "bytes" && $(i + 1) == "spill") spilled[name] += $(i - 1) }
         /Used [0-9]+ registers/ { match($0, /Used [0-9]+/)
             registers[name] = substr($0, RSTART + 5, RLENGTH - 5) }
         END { for (name in registers) print name, registers[name], spilled[name] + 0 }' "$1"
}

# attention_backward_keysILi128ELi1ELi32ELi128ELb0E... -> attention_backward_keys<128,1,32,128,0>
readable() {
    echo "$1" | sed -E 's/^_Z[0-9]+//; s/Ev.*$//; s/IL[ib]/</; s/EL[ib]/,/g; s/E?$/>/'
}

# Both files for every architecture at once: a minute of a quiet machine otherwise.
compile() {
    "$nvcc" -std=c++17 -O3 "-I$root" "-arch=$1" -ptx "$root/kernels/cuda/$2.cu" -o "$work/$1.$2.ptx"
    "${nvcc%nvcc}ptxas" -v "-arch=$1" "$work/$1.$2.ptx" -o "$work/$1.$2.cubin" \
        2>"$work/$1.$2.txt"
}
jobs=()
for arch in "$@"; do
    for name in attention_forward attention_backward; do
        compile "$arch" "$name" &
        jobs+=($!)
    done
done
for job in "${jobs[@]}"; do
    wait "$job" || { cat "$work"/*.txt; echo "FAILED: nvcc"; exit 1; }
done

check() {
    local arch=$1 name=$2 n_hot=0 expected=4 kernel mma copies registers spilled
    count_instructions "$work/$arch.$name.ptx" | sort >"$work/instructions"
    count_registers "$work/$arch.$name.txt" | sort >"$work/registers"
    while read -r kernel mma copies registers spilled; do
        [[ $kernel =~ ^$tensor_core ]] || continue
        printf '%-6s %-46s %5d %7d %9d %7d\n' "$arch" "$(readable "$kernel")" "$mma" "$copies" \
            "$registers" "$spilled"
        [ "$mma" -gt 0 ] || complain "$kernel has no mma.sync"
        [ "$copies" -gt 0 ] || complain "$kernel has no cp.async"
        if [[ $kernel =~ ^$hot ]]; then
            n_hot=$((n_hot + 1))
            [ "$spilled" -eq 0 ] || complain "$kernel spills $spilled bytes on $arch"
        fi
    done < <(join "$work/instructions" "$work/registers")
    # Head dimensions 64 and 128, with and without dropout; two kernels in the backward pass.
    [ "$name" = attention_backward ] && expected=8
    [ "$n_hot" -eq "$expected" ] ||
        complain "$name.cu: found $n_hot kernels for head dimensions 64 and 128, not $expected"
}

printf '%-6s %-46s %5s %7s %9s %7s\n' arch kernel mma copies registers spilled
for arch in "$@"; do
    check "$arch" attention_forward
    check "$arch" attention_backward
done
if [ "$failed" -ne 0 ]; then
    exit 1
fi
echo "ok"
