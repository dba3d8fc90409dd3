/* One value of a document, by the type and range of its row. Main thread, at start. */
#ifndef BALLAST_WORKER_CONFIG_VALUE_H
#define BALLAST_WORKER_CONFIG_VALUE_H

#include "worker/config_table.h"

/* Read a value of the row's type; stored when the row has a field, else only checked. INVALID
 * for the wrong type, OUT_OF_RANGE, TOO_LARGE, UNSUPPORTED for a choice that is known but not in
 * this version. The draft is undefined for this key after a failure. */
enum status config_value_read(const struct config_doc *doc, const struct config_row *row,
                              const char *path, const json_t *value, struct config_draft *draft,
                              struct failure *why) MUST_CHECK;
/* An integer, or a real such as 5e8 that is one. */
bool config_value_whole(const json_t *value, double *out_number, int64_t *out);
/* Records that a value is not what its row allows; returns `status`. */
enum status config_value_wrong(const struct config_doc *doc, const struct config_row *row,
                               const char *path, const json_t *value, enum status status,
                               struct failure *why);

#endif
