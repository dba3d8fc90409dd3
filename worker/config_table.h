/* The table of configuration keys: DeepSpeed's and ours. Every key has one row here, and the row
 * says what becomes of it; a key without a row is an error.
 *
 * Also the draft, the plain struct that rows are read into. Pure; main thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_TABLE_H
#define BALLAST_WORKER_CONFIG_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "proto/strategy.h"
#include "worker/config.h"
#include "worker/config_json.h"

enum config_verdict {
    VERDICT_HONOURED,       /* the value is stored and used */
    VERDICT_WITHOUT_EFFECT, /* accepted, type checked, said once */
    VERDICT_ONLY,           /* this version does one thing; any other value is refused */
    VERDICT_SWITCHED_OFF,   /* a section that is accepted only with "enabled": false */
    VERDICT_REFUSED,        /* never accepted */
    VERDICT_SECTION,        /* holds keys of its own */
};

enum config_type {
    TYPE_BOOL,     /* bool */
    TYPE_COUNT32,  /* uint32_t */
    TYPE_COUNT64,  /* uint64_t */
    TYPE_NUMBER,   /* double */
    TYPE_BYTES,    /* uint64_t; integer or "512 MiB" */
    TYPE_CHOICE,   /* int: index into `choices` */
    TYPE_TEXT,     /* char[CONFIG_PATH_BYTES] */
    TYPE_PATHS,    /* struct config_paths; text or a list of texts */
    TYPE_STEPS,    /* config.pause_at: a count or a list of counts */
    TYPE_BETAS,    /* double[2] */
    TYPE_STRATEGY, /* flat object of strategy keys */
    TYPE_SECTION,
    TYPE_ANY,
};

struct config_row {
    const char *path; /* dotted, as in the file */
    enum config_type type;
    enum config_verdict verdict;
    double low, high;         /* of counts, numbers and bytes; both included */
    bool below_high;          /* `high` itself is not allowed */
    size_t at;                /* offset in struct config_draft; CONFIG_NOWHERE: not stored */
    const char *choices;      /* "auto|cpu|cuda"; for VERDICT_ONLY the JSON values accepted */
    const char *refused;      /* choices that are known but not in this version, "tcp|adapt" */
    const char *strategy_key; /* the value is this strategy key's */
    const char *standard;     /* the default; in parentheses when it is worked out later */
    const char *help;         /* what it does; for the other verdicts the reason */
};

#define CONFIG_NOWHERE SIZE_MAX

enum { CONFIG_MAX_CLAIMS = 48, CONFIG_MAX_ROWS = 288 };

/* Somebody wants a strategy key to have a value; several claims on one key must agree. */
struct config_claim {
    const char *key; /* borrowed from the strategy's table */
    char value[STRATEGY_VALUE_BYTES];
    char path[CONFIG_KEY_BYTES]; /* the configuration key that says so */
    enum config_origin origin;
};

enum { SCHEDULER_WARMUP, SCHEDULER_WARMUP_DECAY, SCHEDULER_WARMUP_COSINE };

struct config_draft {
    struct config config;
    enum { SEEN_NOT, SEEN_AUTO, SEEN_GIVEN } seen[CONFIG_MAX_ROWS];
    uint32_t train_batch, accumulation, number_checkpoints;
    bool cpu_checkpointing, cpu_offload, cpu_offload_param;
    int scheduler, warmup_type;
    double warmup_min_lr, warmup_max_lr, warmup_min_ratio, cos_min_ratio;
    uint64_t warmup_num_steps, total_num_steps;
    double betas[2];
    double dropout;
    bool bf16, bfloat16; /* the new and the old name of one section */
    bool bare_zero; /* "zero_optimization": true or false */
    size_t n_claims;
    struct config_claim claims[CONFIG_MAX_CLAIMS];
};

size_t config_n_rows(void);
const struct config_row *config_row_at(size_t index);
/* NULL when no row has this path. */
const struct config_row *config_row(const char *path);
bool config_is_seen(const struct config_draft *draft, const char *path);
/* Zeroes the draft and stores every default of the table. */
void config_draft_init(struct config_draft *draft);

#endif
