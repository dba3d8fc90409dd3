/* What follows from several keys together: batch sizes, strategy, schedule, files. Main thread,
 * at start. */
#ifndef BALLAST_WORKER_CONFIG_RESOLVE_H
#define BALLAST_WORKER_CONFIG_RESOLVE_H

#include "worker/config_table.h"

/* Completes draft->config. Relative paths in the file start at the file's own folder, others at
 * the working directory. `plan` needs neither data nor steps. CONFLICT names both keys and
 * values; NOT_FOUND and INVALID name a missing key or file. Looks at files, reads none but the
 * model's config.json. */
enum status config_resolve(struct config_draft *draft, const struct config_doc *doc,
                           uint32_t world_size, bool plan, struct failure *why) MUST_CHECK;

#endif
