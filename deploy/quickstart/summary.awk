# Summary of a run whose checkpointing was switched: events.jsonl, then steps.jsonl. Plain awk, so
# that it needs no JSON tool; it relies on one object a line and on flat inner objects only.
# Ends with status 1 when the run does not show what the quickstart is there to show.

# The text of `key`'s value in a piece of JSON: a number, or a string without its quotes.
function value(json, key,    text) {
    if (!match(json, "\"" key "\" *: *(\"[^\"]*\"|[-+0-9.eE]+|true|false|null)"))
        return ""
    text = substr(json, RSTART, RLENGTH)
    sub("^\"" key "\" *: *", "", text)
    gsub("\"", "", text)
    return text
}

# The inner object that stands under `key`.
function inner(json, key) {
    return match(json, "\"" key "\" *: *[{][^{}]*[}]") ? substr(json, RSTART, RLENGTH) : ""
}

# The line without its inner objects: "step" is a key of some of them as well.
function outer(json) {
    gsub("\"[a-z_]*\" *: *[{][^{}]*[}]", "\"\":0", json)
    return json
}

function mebibytes(bytes) {
    return sprintf("%.2f MiB", bytes / 1048576)
}

FILENAME ~ /events[.]jsonl$/ {
    if (value($0, "type") == "switch") {
        n_switches++
        switch_step[n_switches] = value(outer($0), "step")
        switch_text[n_switches] = value($0, "text")
    }
    if (value($0, "type") == "eval")
        eval_loss = value($0, "loss")
    next
}

{
    n_steps++
    top = outer($0)
    loss = value(top, "loss")
    mode = value(inner($0, "strategy"), "checkpointing")
    if (n_steps == 1) {
        first_loss = loss
        first_mode = mode
    }
    last_loss = loss
    if (mode != previous_mode && n_steps > 1) {
        n_changes++
        printf "checkpointing=%s from step %s on\n", mode, value(top, "step")
    }
    previous_mode = mode
    steps_in[mode]++
    speed[mode] += value(top, "tokens_per_second")
    peaks = inner($0, "peak_bytes")
    plans = inner($0, "planned_bytes")
    for (i = 1; i <= n_phases; i++) {
        bytes = value(peaks, phase[i]) + 0
        if (bytes > peak[mode, i])
            peak[mode, i] = bytes
        if (bytes != value(plans, phase[i]) + 0)
            n_off_plan++
    }
}

BEGIN {
    n_phases = split("forward backward step", phase, " ")
}

END {
    if (n_steps < 2) {
        print "steps.jsonl has " n_steps + 0 " steps"
        exit 1
    }
    for (i = 1; i <= n_switches; i++)
        printf "event: switch at step %s: %s\n", switch_step[i], switch_text[i]
    printf "loss: %.4f at the start, %.4f at the end of %d steps", first_loss, last_loss, n_steps
    if (eval_loss != "")
        printf "; %.4f on the text kept for evaluation", eval_loss
    print ""
    printf "%-24s %14s %14s\n", "", "none", "block:1"
    for (i = 1; i <= n_phases; i++)
        printf "%-24s %14s %14s\n", "peak in " phase[i], mebibytes(peak["none", i]),
            mebibytes(peak["block:1", i])
    printf "%-24s %14.0f %14.0f\n", "tokens per second", speed["none"] / (steps_in["none"] + 1e-9),
        speed["block:1"] / (steps_in["block:1"] + 1e-9)
    printf "peaks that differ from the plan: %d\n", n_off_plan

    if (first_mode != "none" || n_changes != 2 || n_switches != 2 || previous_mode != "none")
        bad = bad "\nnot two switches, to block:1 and back"
    if (!(last_loss + 0 < first_loss - 0.5))
        bad = bad "\nthe loss did not fall"
    if (!(peak["block:1", 2] < peak["none", 2]))
        bad = bad "\ncheckpointing did not lower the peak of backward"
    if (n_off_plan > 0)
        bad = bad "\na measured peak differs from the plan"
    if (bad != "") {
        print "the quickstart is not as it should be:" bad
        exit 1
    }
}
