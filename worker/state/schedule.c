/* The learning rate. See schedule.h. */
#include "worker/state/schedule.h"
#include <math.h>

double schedule_lr(const struct schedule *schedule, uint64_t step)
{
    if (step < schedule->warmup_steps) {
        const double part = (double)(step + 1) / (double)schedule->warmup_steps;
        return schedule->warmup_min_lr + (schedule->lr - schedule->warmup_min_lr) * part;
    }
    if (schedule->kind == SCHEDULE_KIND_CONSTANT) {
        return schedule->lr;
    }
    const uint64_t decay_steps = schedule->total_steps > schedule->warmup_steps + 1
                                     ? schedule->total_steps - schedule->warmup_steps - 1
                                     : 1;
    double part = (double)(step - schedule->warmup_steps) / (double)decay_steps;
    part = part > 1.0 ? 1.0 : part;
    const double low = schedule->lr * schedule->min_ratio;
    if (schedule->kind == SCHEDULE_KIND_LINEAR) {
        return schedule->lr + (low - schedule->lr) * part;
    }
    return low + 0.5 * (schedule->lr - low) * (1.0 + cos(acos(-1.0) * part));
}
