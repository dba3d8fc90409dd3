#!/usr/bin/env bash
# From a bare Debian 12 to a trained model: installs what is missing, builds, trains a small
# byte-level Llama on the King James Bible on two ranks, switches activation checkpointing on and
# off while it trains, and says what that did. Repeating it reinstalls and rebuilds nothing.
#
#   deploy/quickstart.sh [--steps N] [--no-install]
#
# Files of the run are in runs/quickstart, which every start replaces.
set -euo pipefail
# shellcheck source=deploy/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

steps=280 install=yes ranks=2
while [ $# -gt 0 ]; do
    case "$1" in
        --steps)
            [[ "${2:-}" =~ ^[1-9][0-9]{1,5}$ && "$2" -ge 40 ]] || die "--steps wants a number from 40 to 999999"
            steps=$2
            shift 2
            ;;
        --no-install)
            install=no
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            warn "unknown argument '$1'; known: --steps N, --no-install"
            exit 2
            ;;
    esac
done

run_dir=runs/quickstart
config=deploy/quickstart/quickstart.json
bin=build/release/bin
trainer='' client=''

# Whatever happens, nothing of ours stays behind: TERM to mpirun ends its ranks, and the daemon
# follows its links.
clean_up() {
    local code=$?
    trap - EXIT INT TERM
    for child in $client $trainer; do kill -TERM "$child" 2>/dev/null || true; done
    [ -z "$trainer" ] || wait "$trainer" 2>/dev/null || true
    exit $code
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

prepare_text() {
    local folder=build/data part
    if [ -s $folder/kjv-train.txt ] && [ -s $folder/kjv-eval.txt ]; then
        echo "there already: $folder/kjv-train.txt, $folder/kjv-eval.txt"
        return
    fi
    mkdir -p $folder
    part=$(mktemp -d $folder/part.XXXXXX)
    bible -p /usr/lib -f gen1:1-rev22:21 </dev/null >"$part/all" || die "'bible' cannot print its text"
    local n_lines
    n_lines=$(wc -l <"$part/all")
    [ "$n_lines" -eq 31102 ] || die "'bible' printed $n_lines verses, not 31102"
    # Revelation is kept for evaluation.
    grep -v '^Rev' "$part/all" >"$part/train"
    grep '^Rev' "$part/all" >"$part/eval"
    mv "$part/train" $folder/kjv-train.txt
    mv "$part/eval" $folder/kjv-eval.txt
    rm -r "$part"
    echo "wrote $folder/kjv-train.txt ($(wc -c <$folder/kjv-train.txt) bytes) and" \
        "$folder/kjv-eval.txt ($(wc -c <$folder/kjv-eval.txt) bytes)"
}

# The daemon of a run that has just ended may still be closing its files.
clear_run_dir() {
    local pid='' tries
    if [ -f $run_dir/control.json ]; then
        pid=$(sed -n 's/.*"pid" *: *\([0-9]*\).*/\1/p' $run_dir/control.json)
    fi
    for tries in 1 2 3 4 5 6; do
        [[ "$(cat "/proc/${pid:-none}/comm" 2>/dev/null)" == ballast* ]] || break
        [ $tries -lt 6 ] || die "a run is still going on in $run_dir (process $pid); stop it with" \
            "'$bin/ballastctl --run-dir $run_dir stop'"
        sleep 1
    done
    rm -rf $run_dir
    mkdir -p runs
}

worker_arguments=(--config "$config" --steps "$steps")

start_training() {
    mpirun -n $ranks --bind-to none "$bin/ballast-worker" "${worker_arguments[@]}" --run-dir $run_dir \
        </dev/null 9>&- &
    trainer=$!
}

# ctl ARGUMENT...: a client command that gives up at once when training ends before it does.
ctl() {
    local ended='' code=0
    "$bin/ballastctl" "$@" --run-dir $run_dir </dev/null &
    client=$!
    wait -n -p ended "$client" "$trainer" || code=$?
    if [ "$ended" = "$trainer" ]; then
        trainer=''
        die "training ended (exit code $code) before 'ballastctl $*' was answered; its messages are above"
    fi
    client=''
    [ $code -eq 0 ] || die "'ballastctl $*' failed with exit code $code"
}

started=$SECONDS
if [ $install = yes ]; then
    say "packages"
    deploy/install-deps.sh
fi
say "build"
targets=(ballast-worker ballastd ballastctl)
# Where there is a GPU and a compiler for it, its device too; the run takes it by itself.
if [ -e /dev/nvidiactl ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
    targets+=(ballast-cuda)
fi
build release "${targets[@]}" || die "the build failed; its messages are above"
say "text"
prepare_text
say "device"
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    if [ -f build/release/bin/libballast-cuda.so ]; then
        echo "a GPU is there: training on it"
    else
        echo "a GPU is there, but no nvcc to build for it: training on the CPU"
    fi
else
    echo "no GPU found: training on the CPU"
fi

mkdir -p build
exec 9>build/.quickstart.lock
flock -n 9 || die "another quickstart is running in this checkout"
clear_run_dir

say "the memory account before the first step: $ranks ranks, checkpointing=none, then block:1"
"$bin/ballast-worker" "${worker_arguments[@]}" --plan --world $ranks
"$bin/ballast-worker" "${worker_arguments[@]}" --plan --world $ranks --set checkpointing=block:1

say "training: $steps steps on $ranks ranks"
start_training
ctl wait --for step=$((steps / 4)) --timeout 300
ctl status
ctl wait --for step=$((steps / 2)) --timeout 300
say "ballastctl set checkpointing=block:1"
ctl set checkpointing=block:1 --wait --timeout 60
ctl wait --for step=$((steps * 3 / 4)) --timeout 300
ctl memory --at-peak forward
say "ballastctl set checkpointing=none"
ctl set checkpointing=none --wait --timeout 60
code=0
wait "$trainer" || code=$?
trainer=''
[ $code -eq 0 ] || die "training failed with exit code $code; its messages are above"

say "summary"
awk -f deploy/quickstart/summary.awk $run_dir/events.jsonl $run_dir/steps.jsonl || die "see above"
echo "everything took $((SECONDS - started)) s; the files of the run are in $run_dir"
