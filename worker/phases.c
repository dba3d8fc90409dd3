/* What happens around a phase: admission, telemetry, clock, and the proof of its peak. */
#include "proto/base/fault.h"
#include "proto/base/log.h"
#include "proto/base/units.h"
#include "worker/run.h"

void run_leave_phase(struct run *run)
{
    const double now = units_monotonic_s();
    run->phase_seconds[run->phase] += now - run->phase_started;
    run->phase_started = now;
}

enum status run_enter_phase(void *user, enum phase phase, struct failure *why)
{
    struct run *run = user;
    run_leave_phase(run);
    run->phase = phase;
    fault_here((int)run->comm.rank, (int64_t)run->step, phase);
    telemetry_phase(&run->telemetry, phase);
    run->admit.step = run->step;
    const enum status status = admit_phase(&run->admit, phase, why);
    run_publish_committed(run);
    return status;
}

void run_publish_committed(struct run *run)
{
    atomic_store_explicit(&run->telemetry.committed_bytes,
                          atomic_load(&run->device.committed_bytes), memory_order_relaxed);
}

uint64_t run_measured_peak(const struct run *run, enum phase phase)
{
    return ledger_resident_bytes(&run->training.ledger) +
           run->training.workspace.high_water[phase];
}

enum status run_check_peaks(const struct run *run, struct failure *why)
{
    static const enum phase phases[] = {PHASE_FORWARD, PHASE_BACKWARD, PHASE_STEP};
    const struct workspace *workspace = &run->training.workspace;
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        const enum phase phase = phases[i];
        const uint64_t measured = run_measured_peak(run, phase);
        const uint64_t planned = run->plan.phases[phase].peak_bytes;
        if (measured != planned) {
            return fail(why, STATUS_CORRUPT,
                        "the plan is not exact: %s measured %llu bytes, planned %llu",
                        phase_name(phase), (unsigned long long)measured,
                        (unsigned long long)planned);
        }
        /* Painted: the bytes really written tell the same story. */
        if (workspace->paint && workspace->touched[phase] != workspace->high_water[phase]) {
            return fail(why, STATUS_CORRUPT,
                        "the plan is not exact: %s reserved up to %llu bytes, touched up to %llu",
                        phase_name(phase), (unsigned long long)workspace->high_water[phase],
                        (unsigned long long)workspace->touched[phase]);
        }
    }
    return ledger_check(&run->training.ledger, why);
}
