/* Faults on purpose: a fixed table of armed specs and where this process is.
 *
 * Owns both. Arming happens before threads start; after that any thread may ask, so all that
 * changes is atomic. Nothing here allocates: the heap itself asks. */
#include "proto/base/fault.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include "proto/base/units.h"

enum { MAX_SPECS = 16, SPEC_BYTES = 160, ANY_RANK = -1, MAX_RANK = 1 << 20 };
static const int64_t any_step = -1;

static const char *const point_names[] = {"commit", "host", "pinned", "collective",
                                          "io",     "link", "alloc"};
_Static_assert(sizeof point_names / sizeof *point_names == N_FAULT_POINTS, "a name each");

struct spec {
    char text[SPEC_BYTES];
    enum fault_point point;
    int rank;         /* ANY_RANK */
    int64_t step;     /* any_step */
    enum phase phase; /* N_PHASES: any */
    uint64_t nth;     /* >= 1 */
    uint64_t repeat;  /* 0: for ever */
    double for_s;     /* 0: no window */

    _Atomic uint64_t n_matches;
    _Atomic uint64_t n_fired;
    _Atomic uint64_t n_admissions; /* that fault_forces_admission() asked for */
    _Atomic bool open;             /* the window of `for` has begun */
    _Atomic double open_s;
};

static struct spec specs[MAX_SPECS];
static _Atomic unsigned n_specs;
static _Atomic int here_rank;
static _Atomic int64_t here_step;
static _Atomic unsigned here_phase = PHASE_SETUP;

const char *fault_point_name(enum fault_point point)
{
    return (unsigned)point < N_FAULT_POINTS ? point_names[point] : "unknown";
}

static enum status parse_number(const char *key, const char *value, int64_t low, int64_t high,
                                int64_t *out, struct failure *why)
{
    if (units_parse_int(value, low, high, out) != STATUS_OK) {
        return fail(why, STATUS_INVALID, "fault: %s=%s: must be a whole number from %lld%s", key,
                    value, (long long)low, high == MAX_RANK ? " to 1048576" : "");
    }
    return STATUS_OK;
}

static enum status parse_phase(const char *value, enum phase *out, struct failure *why)
{
    if (!phase_from_name(value, out)) {
        return fail(why, STATUS_INVALID,
                    "fault: phase=%s: must be one of setup forward backward step eval save switch",
                    value);
    }
    return STATUS_OK;
}

static enum status parse_window(const char *value, double *out, struct failure *why)
{
    double seconds;
    if (units_parse_double(value, &seconds) != STATUS_OK || !(seconds > 0 && seconds <= 86400)) {
        return fail(why, STATUS_INVALID,
                    "fault: for=%s: must be seconds, above 0 and at most 86400", value);
    }
    *out = seconds;
    return STATUS_OK;
}

static const char *const key_names[] = {"rank", "step", "phase", "nth", "repeat", "for"};
enum { KEY_RANK, KEY_STEP, KEY_PHASE, KEY_NTH, KEY_REPEAT, KEY_FOR, N_KEYS };

static enum status parse_key(struct spec *spec, unsigned key, const char *value,
                             struct failure *why)
{
    int64_t number = 0;
    enum status status = STATUS_OK;
    switch (key) {
    case KEY_RANK:
        status = parse_number("rank", value, 0, MAX_RANK, &number, why);
        spec->rank = (int)number;
        break;
    case KEY_STEP:
        status = parse_number("step", value, 0, INT64_MAX, &spec->step, why);
        break;
    case KEY_PHASE:
        status = parse_phase(value, &spec->phase, why);
        break;
    case KEY_NTH:
        status = parse_number("nth", value, 1, INT64_MAX, &number, why);
        spec->nth = (uint64_t)number;
        break;
    case KEY_REPEAT:
        status = parse_number("repeat", value, 0, INT64_MAX, &number, why);
        spec->repeat = (uint64_t)number;
        break;
    default:
        status = parse_window(value, &spec->for_s, why);
        break;
    }
    return status;
}

/* One `key=value`, which is cut apart in place. */
static enum status parse_part(struct spec *spec, char *part, unsigned *seen, struct failure *why)
{
    char *equals = strchr(part, '=');
    if (equals == NULL) {
        return fail(why, STATUS_INVALID, "fault: '%s': must be key=value", part);
    }
    *equals = '\0';
    for (unsigned key = 0; key < N_KEYS; key++) {
        if (strcmp(part, key_names[key]) != 0) {
            continue;
        }
        if ((*seen & 1U << key) != 0) {
            return fail(why, STATUS_INVALID, "fault: key '%s' is given twice", part);
        }
        *seen |= 1U << key;
        return parse_key(spec, key, equals + 1, why);
    }
    return fail(why, STATUS_UNKNOWN_KEY,
                "fault: unknown key '%s': must be one of rank step phase nth repeat for", part);
}

static enum status parse_spec(struct spec *spec, struct failure *why)
{
    char text[SPEC_BYTES];
    memcpy(text, spec->text, sizeof text);
    char *parts = strchr(text, ':');
    if (parts != NULL) {
        *parts++ = '\0';
    }
    unsigned point = 0;
    while (point < N_FAULT_POINTS && strcmp(text, point_names[point]) != 0) {
        point++;
    }
    if (point == N_FAULT_POINTS) {
        return fail(why, STATUS_NOT_FOUND,
                    "fault: unknown point '%s': must be one of commit host pinned collective io "
                    "link alloc",
                    text);
    }
    spec->point = (enum fault_point)point;
    unsigned seen = 0;
    while (parts != NULL) {
        char *next = strchr(parts, ',');
        if (next != NULL) {
            *next++ = '\0';
        }
        enum status status = parse_part(spec, parts, &seen, why);
        if (status != STATUS_OK) {
            return status;
        }
        parts = next;
    }
    /* A window without a count fires whenever it is asked while it is open. */
    if (spec->for_s > 0 && (seen & 1U << KEY_REPEAT) == 0) {
        spec->repeat = 0;
    }
    return STATUS_OK;
}

enum status fault_arm(const char *text, struct failure *why)
{
    unsigned n = atomic_load(&n_specs);
    if (n == MAX_SPECS) {
        return fail(why, STATUS_TOO_LARGE, "fault: '%.80s': at most %d faults can be armed", text,
                    MAX_SPECS);
    }
    size_t bytes = strlen(text);
    if (bytes >= SPEC_BYTES) {
        return fail(why, STATUS_TOO_LARGE,
                    "fault: '%.40s...' has %zu characters: at most %d are allowed", text, bytes,
                    SPEC_BYTES - 1);
    }
    struct spec *spec = &specs[n];
    memset(spec, 0, sizeof *spec);
    memcpy(spec->text, text, bytes);
    spec->rank = ANY_RANK;
    spec->step = any_step;
    spec->phase = N_PHASES;
    spec->nth = 1;
    spec->repeat = 1;
    enum status status = parse_spec(spec, why);
    if (status == STATUS_OK) {
        atomic_store_explicit(&n_specs, n + 1, memory_order_release);
    }
    return status;
}

void fault_disarm_all(void)
{
    atomic_store(&n_specs, 0);
}

void fault_here(int rank, int64_t step, enum phase phase)
{
    atomic_store_explicit(&here_rank, rank, memory_order_relaxed);
    atomic_store_explicit(&here_step, step, memory_order_relaxed);
    atomic_store_explicit(&here_phase, (unsigned)phase, memory_order_relaxed);
}

static bool matches_moment(const struct spec *spec, int64_t step, enum phase phase)
{
    return (spec->step == any_step || spec->step == step) &&
           (spec->phase == N_PHASES || spec->phase == phase);
}

static bool take_shot(struct spec *spec)
{
    uint64_t fired = atomic_load(&spec->n_fired);
    do {
        if (spec->repeat != 0 && fired >= spec->repeat) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&spec->n_fired, &fired, fired + 1));
    return true;
}

static bool spec_fires(struct spec *spec)
{
    if (spec->rank != ANY_RANK &&
        spec->rank != atomic_load_explicit(&here_rank, memory_order_relaxed)) {
        return false;
    }
    if (spec->for_s > 0 && atomic_load_explicit(&spec->open, memory_order_acquire)) {
        /* An open window does not care which step it is by now. */
        return units_monotonic_s() - atomic_load(&spec->open_s) < spec->for_s && take_shot(spec);
    }
    int64_t step = atomic_load_explicit(&here_step, memory_order_relaxed);
    enum phase phase = (enum phase)atomic_load_explicit(&here_phase, memory_order_relaxed);
    if (!matches_moment(spec, step, phase) ||
        atomic_fetch_add(&spec->n_matches, 1) + 1 < spec->nth) {
        return false;
    }
    if (spec->for_s > 0) {
        /* Two threads that open it at once agree to within their race. */
        atomic_store(&spec->open_s, units_monotonic_s());
        atomic_store_explicit(&spec->open, true, memory_order_release);
    }
    return take_shot(spec);
}

static bool (*ask)(enum fault_point point); /* NULL: this copy decides */

void fault_ask(bool (*fires)(enum fault_point point))
{
    ask = fires;
}

bool fault_fires(enum fault_point point)
{
    if (ask != NULL) {
        return ask(point);
    }
    unsigned n = atomic_load_explicit(&n_specs, memory_order_acquire);
    bool fires = false;
    for (unsigned i = 0; i < n; i++) {
        if (specs[i].point == point && spec_fires(&specs[i])) {
            fires = true;
        }
    }
    return fires;
}

bool fault_forces_admission(int64_t step, enum phase phase)
{
    unsigned n = atomic_load_explicit(&n_specs, memory_order_acquire);
    bool forces = false;
    for (unsigned i = 0; i < n; i++) {
        struct spec *spec = &specs[i];
        if (spec->point != FAULT_COMMIT) {
            continue;
        }
        bool endless = spec->repeat == 0;
        uint64_t needed = spec->nth - 1 + spec->repeat;
        /* Where the fault fires is known on one rank only, so what is counted here is what all
         * ranks do alike: admissions asked for. Each holds at least one match. */
        bool open = spec->for_s > 0 && atomic_load(&spec->n_admissions) >= spec->nth;
        if ((open || matches_moment(spec, step, phase)) &&
            (endless || atomic_load(&spec->n_admissions) < needed)) {
            atomic_fetch_add(&spec->n_admissions, 1);
            forces = true;
        }
    }
    return forces;
}

bool fault_unfired(int rank, char *out_spec, size_t out_bytes)
{
    unsigned n = atomic_load_explicit(&n_specs, memory_order_acquire);
    for (unsigned i = 0; i < n; i++) {
        bool ours = specs[i].rank == ANY_RANK || specs[i].rank == rank;
        if (ours && atomic_load(&specs[i].n_fired) == 0) {
            snprintf(out_spec, out_bytes, "%s", specs[i].text);
            return true;
        }
    }
    return false;
}

int fault_highest_rank(void)
{
    unsigned n = atomic_load_explicit(&n_specs, memory_order_acquire);
    int highest = ANY_RANK;
    for (unsigned i = 0; i < n; i++) {
        highest = specs[i].rank > highest ? specs[i].rank : highest;
    }
    return highest;
}
