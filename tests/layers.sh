#!/usr/bin/env bash
# Checks what no compiler does: that folders and the lines of worker/ use only what lies below
# them, that foreign headers stay home, that files and functions are short enough to read, and that no
# path of one machine and no unfinished business is left. Prints file:line of every violation.
# Arguments: another root to check (for the check's own test).
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"

files() { # NAME-PATTERN...
    local names=() pattern
    for pattern in "$@"; do names+=(-o -name "$pattern"); done
    find . -type d \( -name .git -o -name build -o -name runs -o -name .deps -o -name .cache \
        -o -name __pycache__ \) -prune -o -type f \( "${names[@]:1}" \) -print | sed 's,^\./,,' | sort
}

# --- includes --------------------------------------------------------------------------------
# The rows of `design: Folders`. A folder may use itself and what its row names; in worker/ the number
# is the line, counted from the bottom, and a line may use itself and lower ones.
includes() {
    files '*.c' '*.h' '*.cu' '*.cuh' | tr '\n' '\0' | xargs -0 -r grep -HnE '^[ \t]*#[ \t]*include' |
        awk -F: '
    function folder(path) {
        if (path ~ /^proto\/(base\/|account\.)/) return "base"
        return substr(path, 1, index(path, "/") - 1)
    }
    # Values: plain structs and enums without behaviour, which any line of worker/ may name. They
    # themselves use nothing of worker/ but other values.
    function is_value(path) {
        return path == "worker/telemetry.h" || path == "worker/model/spec.h" ||
               path == "worker/data/tokens.h"
    }
    function line_of(path) {
        if (path ~ /^worker\/config/) return 1
        if (path ~ /^worker\/data\//) return 2
        if (path ~ /^worker\/memory\//) return 3
        if (path ~ /^worker\/link/) return 4
        if (path ~ /^worker\/parallel\//) return 5
        if (path ~ /^worker\/state\//) return 6
        if (path ~ /^worker\/save\//) return 7
        if (path ~ /^worker\/model\//) return 8
        if (path ~ /^worker\/strategy\//) return 9
        if (path ~ /^worker\/train\./) return 11
        if (path ~ /^worker\/main\./) return 12
        return 10
    }
    function bad(what) {
        print $1 ":" $2 ": " what
        n_bad++
    }
    # A foreign header and the files it is at home in; tests may use anything.
    function foreign(header, pattern, home) {
        if (included ~ pattern && $1 !~ home && from != "tests") bad(header " does not belong here")
    }
    BEGIN {
        may["base"] = " base "
        may["proto"] = " base proto "
        may["kernels"] = " base kernels "
        may["worker"] = " base proto kernels worker "
        may["daemon"] = " base proto daemon "
        may["client"] = " base proto client "
        # Deliberate exceptions, each with its reason.
        # The link tells the daemon which exchange a rank is in; it reads atomics and calls nothing.
        except["worker/link.h worker/parallel/comm.h"] = 1
        except["worker/link.c worker/parallel/comm.h"] = 1
    }
    {
        from = folder($1)
        quoted = match($0, /"[^"]*"/)
        if (!quoted && !match($0, /<[^>]*>/)) next
        included = substr($0, RSTART + 1, RLENGTH - 2)

        foreign("libuv", "^uv[.]h$", "^(daemon|client)/")
        foreign("MPI", "^mpi(-ext)?[.]h$", "^worker/parallel/comm_mpi[.]c$")
        foreign("oneDNN", "dnnl", "^kernels/cpu/")
        foreign("CUDA", "^(cuda|cublas|cudnn)", "^(kernels/cuda/|worker/parallel/comm_nccl[.]c$)")
        foreign("NCCL", "^nccl", "^(kernels/cuda/|worker/parallel/comm_nccl[.]c$)")
        foreign("hwloc", "^hwloc", "^worker/")
        if (!quoted) next

        if (included !~ /\//) {
            bad("\"" included "\" is not named from the root")
            next
        }
        if (from == "tests") next
        to = folder(included)
        if (!(from in may)) bad("no rule for the folder " from)
        else if (to == "tests") bad("only tests may use " included)
        else if (index(may[from], " " to " ") == 0) bad(from " may not use " included)
        else if (from == "worker" && to == "worker" && !(($1 " " included) in except)) {
            if (is_value(included)) next
            if (is_value($1)) bad("a value may not use " included)
            else if (line_of(included) > line_of($1)) bad("points upward to " included)
        }
    }
    END { exit n_bad > 0 }'
}

# --- sizes -----------------------------------------------------------------------------------
sizes() {
    files '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.sh' | tr '\n' '\0' | xargs -0 -r awk '
    function leave(path) {
        if (path != "" && n_lines > 800) {
            print path ":1: " n_lines " lines, at most 800"
            n_bad++
        }
    }
    FNR == 1 { leave(path); path = FILENAME; n_lines = 0; start = 0; title = "" }
    { n_lines++ }
    FILENAME !~ /[.](c|h|cu|cuh)$/ { next }
    # Functions begin in column one and end with a brace there.
    /^[a-z].*[(]/ && !/;[ \t]*$/ { title = $0; title_line = FNR }
    (/^[{]/ || /^[a-z].*[)] [{]$/) && title != "" { start = title_line }
    /^[}]/ {
        if (start && FNR - start + 1 > 100) {
            sub(/[(].*/, "", title)
            print FILENAME ":" start ": " title " has " FNR - start + 1 " lines, at most 100"
            n_bad++
        }
        start = 0
        title = ""
    }
    END { leave(path); exit n_bad > 0 }'
}

# --- words -----------------------------------------------------------------------------------
# (The patterns are written so that they do not match themselves.)
words() {
    local found=0
    if files '*' | tr '\n' '\0' | xargs -0 -r grep -InE '(^|[^A-Za-z0-9_.])/(wor[k]|roo[t])/'; then
        echo 'a path of one machine: name things relative to the repository'
        found=1
    fi
    if files '*' | tr '\n' '\0' | xargs -0 -r grep -InwE 'TOD[O]|FIXM[E]|XX[X]'; then
        echo 'unfinished business: finish it, or refuse it with a clear message'
        found=1
    fi
    return $found
}

result=0
includes || result=1
sizes || result=1
words || result=1
[ $result -eq 0 ] && echo "layers, sizes and words are as they should be"
exit $result
