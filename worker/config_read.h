/* A document read into a draft, key by key, through the table. Main thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_READ_H
#define BALLAST_WORKER_CONFIG_READ_H

#include "worker/config_table.h"

/* What became of one key, for --check-config. */
struct config_finding {
    int line; /* 0: not from the file */
    enum config_verdict verdict;
    char origin[64]; /* "--steps 5", or "" */
    char path[CONFIG_KEY_BYTES];
    char value[CONFIG_VALUE_BYTES];
    char why[256];
};

struct config_findings {
    struct config_finding *items; /* owned */
    size_t n, max;
};

/* Reads every key of `doc` into `draft` (initialised). The first refusal ends it, unless
 * `findings` (may be NULL) collects a verdict for every key: then reading goes on and the first
 * refusal is returned at the end. */
enum status config_read(const struct config_doc *doc, struct config_draft *draft,
                        struct config_findings *findings, struct failure *why) MUST_CHECK;
void config_findings_fini(struct config_findings *findings);

#endif
