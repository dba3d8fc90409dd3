#!/usr/bin/env bash
# Builds everything and runs the tests; the last line is "N passed, N failed, N skipped".
#
#   deploy/test.sh                   what every change has to pass: a fixed-seed slice of every
#                                    sweep, under 20 minutes on two cores
#   deploy/test.sh --full [AREA...]  the full sweeps of these areas (all when none is named), each
#                                    under an hour
#   deploy/test.sh --no-install ...  without looking for missing packages
#
# Areas: unit modes faults fuzz control parity plan cuda bench. An area is a ctest label; full sweeps see
# BALLAST_FULL=1 and BALLAST_SWEEP=full in their environment. Output of each stage is in
# build/test-logs. Nothing is rebuilt that has not changed.
set -uo pipefail
# shellcheck source=deploy/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

all_areas=(unit modes faults fuzz control parity plan cuda bench)
areas=() full=no install=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --full) full=yes ;;
        --no-install) install=no ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            if [ $full = no ] || ! [[ " ${all_areas[*]} " == *" $1 "* ]]; then
                warn "unknown argument '$1'; known: --full [${all_areas[*]}], --no-install"
                exit 2
            fi
            areas+=("$1")
            ;;
    esac
    shift
done
[ ${#areas[@]} -gt 0 ] || areas=("${all_areas[@]}")
if [ $full = yes ]; then export BALLAST_FULL=1 BALLAST_SWEEP=full; fi

logs=build/test-logs
mkdir -p build
exec 9>build/.test.lock
flock -n 9 || die "the tests are already running in this checkout"
rm -rf $logs
mkdir -p $logs

passed=0 failed=0 skipped=0
table=() failures=() skips=()
started=$SECONDS

record() { # NAME RESULT DETAIL SECONDS
    table+=("$(printf '%-22s %-8s %-32s %5d s' "$1" "$2" "$3" "$4")")
}

# stage NAME COMMAND...: one check or preparation that counts as one test. Returns its success.
stage() {
    local name=$1 from=$SECONDS
    shift
    say "$name"
    if "$@" >"$logs/$name.log" 2>&1 </dev/null; then
        passed=$((passed + 1))
        record "$name" ok '' $((SECONDS - from))
        return 0
    fi
    failed=$((failed + 1))
    failures+=("$name (see $logs/$name.log)")
    record "$name" FAILED '' $((SECONDS - from))
    grep -vE "^\[[0-9]+/[0-9]+\] " "$logs/$name.log" | tail -n 40
    return 1
}

skip() { # NAME WHY
    skipped=$((skipped + 1))
    skips+=("$1: $2")
    record "$1" skipped '' 0
}

# tests NAME PRESET ARGUMENT...: ctest in a preset's folder; every test counts.
tests() {
    local name=$1 preset=$2 from=$SECONDS code=0
    shift 2
    say "$name"
    "${unrandomised[@]}" ctest --test-dir "build/$preset" --output-on-failure --no-tests=ignore \
        -j "$(nproc)" "$@" >"$logs/$name.log" 2>&1 </dev/null || code=$?
    # Lines such as " 3/41 Test  #3: test_frame .......   Passed    0.02 sec"
    local results n_ok n_bad n_skipped
    results=$(sed -n 's/^ *[0-9]*\/[0-9]* Test *#[0-9]*: \([^ ]*\) \.*\** *\(.*\)$/\1 \2/p' "$logs/$name.log")
    n_ok=$(grep -c ' Passed ' <<<"$results")
    n_skipped=$(grep -cE ' (Skipped|Not Run \(Disabled\)) ' <<<"$results")
    n_bad=$(grep -c . <<<"$results")
    n_bad=$((n_bad - n_ok - n_skipped))
    passed=$((passed + n_ok)) failed=$((failed + n_bad)) skipped=$((skipped + n_skipped))
    while read -r test _; do
        [ -z "$test" ] || skips+=("$name/$test: see $logs/$name.log")
    done < <(grep -E ' (Skipped|Not Run \(Disabled\)) ' <<<"$results")
    while read -r test how; do
        [ -z "$test" ] || failures+=("$name/$test: $how")
    done < <(grep -vE ' (Passed|Skipped|Not Run \(Disabled\)) ' <<<"$results")
    if [ $code -ne 0 ] && [ $n_bad -eq 0 ]; then
        failed=$((failed + 1))
        failures+=("$name: ctest ended with $code (see $logs/$name.log)")
    fi
    if [ -z "$results" ]; then
        skip "$name" "there are no such tests"
        return
    fi
    local result=ok
    if [ $code -ne 0 ]; then
        result=FAILED
        grep -v ' Passed ' "$logs/$name.log" | tail -n 60
    fi
    record "$name" $result "$n_ok passed, $n_bad failed, $n_skipped skipped" $((SECONDS - from))
}

# Sanitizers: errors end the program; known leaks and races inside other libraries are listed in
# tests/*.supp. ThreadSanitizer needs addresses in their usual place.
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:detect_stack_use_after_return=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp:halt_on_error=1:second_deadlock_stack=1
unrandomised=()

run_unit_sanitized() {
    if stage build-asan build asan; then
        tests unit-asan asan -L '^unit$'
    fi
    if stage build-tsan build tsan; then
        setarch "$(uname -m)" -R true 2>/dev/null && unrandomised=(setarch "$(uname -m)" -R)
        OMP_NUM_THREADS=1 tests unit-tsan tsan -L '^unit$'
        unrandomised=()
    fi
}

fuzzers=()
for file in tests/fuzz/fuzz_*.c; do
    [ ! -f "$file" ] || fuzzers+=("$(basename "$file" .c)")
done

# The fixed-seed slice: ctest runs it with the driver of tests/fuzz.
run_fuzz() {
    if stage build-fuzz build asan "${fuzzers[@]}"; then
        tests fuzz asan -L '^fuzz$'
    fi
}

# libFuzzer itself, half an hour in all. What it finds worth keeping stays in build/fuzz-corpus.
run_libfuzzer() {
    stage build-libfuzzer build fuzz "${fuzzers[@]}" || return
    local seconds=$((1800 / ${#fuzzers[@]}))
    for fuzzer in "${fuzzers[@]}"; do
        mkdir -p "build/fuzz-corpus/$fuzzer"
        "build/release/bin/$fuzzer" --write-seeds "build/fuzz-corpus/$fuzzer" >"$logs/$fuzzer-seeds.log" 2>&1
        stage "$fuzzer" "build/fuzz/bin/$fuzzer" -max_total_time=$seconds -timeout=10 \
            "-artifact_prefix=$logs/$fuzzer-" "build/fuzz-corpus/$fuzzer"
    done
}

# The whole CUDA worker without a GPU, under AddressSanitizer: stray accesses and freed memory show.
run_cuda() {
    stage build-asan-cuda build asan-cuda && tests cuda asan-cuda -L '^cuda$'
}

# Benchmarks are programs that print a table; they fail only when they cannot run.
run_benchmarks() {
    if [ -x tests/cuda/ptx.sh ]; then # registers and spills of the GPU's kernels, where nvcc is
        tests/cuda/ptx.sh | tee "$logs/ptx.log" || [ "${PIPESTATUS[0]}" = 77 ]
    fi
    for program in build/release/bin/bench_*; do
        [ -x "$program" ] || continue
        if stage "$(basename "$program")" "$program"; then cat "$logs/$(basename "$program").log"; fi
    done
    if python3 -c 'import torch' 2>/dev/null; then # beside bench_step, where it is installed
        if stage torch_step python3 tests/bench/torch_step.py; then cat "$logs/torch_step.log"; fi
    fi
}

finish() {
    echo
    printf '%s\n' "${table[@]}"
    echo
    if [ ${#skips[@]} -gt 0 ]; then printf 'skipped: %s\n' "${skips[@]}"; fi
    if [ ${#failures[@]} -gt 0 ]; then printf 'failed: %s\n' "${failures[@]}"; fi
    echo "all of it took $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ $failed -eq 0 ]
    exit
}

if [ $install = yes ]; then
    say "packages"
    deploy/install-deps.sh --tests || die "not all packages are there"
fi
if [ $full = no ]; then
    stage layers tests/layers.sh
    stage headers tests/headers.sh
    # Without the plain build nothing else has a meaning.
    stage build-release build release || finish
    tests release release -LE '^(bench|fuzz)$'
    run_unit_sanitized
    run_fuzz
    if stage build-clang build clang; then
        tests unit-clang clang -L '^unit$'
    fi
else
    stage build-release build release || finish
    for area in "${areas[@]}"; do
        case "$area" in
            fuzz) run_libfuzzer ;;
            bench) run_benchmarks ;;
            cuda) run_cuda ;;
            *) tests "$area" release -L "^$area\$" ;;
        esac
        if [ "$area" = unit ]; then run_unit_sanitized; fi
    done
fi
finish
