/* Words about the rows of the table. Pure; any thread. */
#ifndef BALLAST_WORKER_CONFIG_WORDS_H
#define BALLAST_WORKER_CONFIG_WORDS_H

#include "worker/config_table.h"

/* "1 to 65535", "one of auto, cpu"; for messages and help. Returns `text`. */
enum { CONFIG_RANGE_BYTES = 160 };
const char *config_range_text(const struct config_row *row, char text[static CONFIG_RANGE_BYTES]);
/* Index of `value` among "a|b|c", -1 if it is none of them. Letter case does not count. */
int config_choice(const char *choices, const char *value);
/* The known name nearest to a mistyped one, among the keys inside `section` ("" for the top
 * level, "ballast.strategy" for strategy keys); NULL when nothing is near. */
const char *config_nearest(const char *section, const char *name);
/* The same over a list; `best` starts at NULL and keeps the nearest so far with its distance. */
void config_nearer(const char *name, const char *candidate, const char **best, size_t *distance);

#endif
