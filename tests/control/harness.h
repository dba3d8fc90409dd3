/* A ballastd in a folder of its own, with workers and clients at hand.
 *
 * Every helper asserts that it succeeds. Waits are bounded. */
#ifndef BALLAST_TESTS_CONTROL_HARNESS_H
#define BALLAST_TESTS_CONTROL_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "tests/lib/fake_worker.h"
#include "tests/lib/raw_client.h"

enum { HARNESS_WORLD = 2 };

struct harness {
    char folder[64]; /* run folder and runtime folder */
    char run_id[32];
    char socket_path[108], link_path[108];
    pid_t pid; /* 0: not running, or reaped */
    struct fake_worker workers[HARNESS_WORLD];
};

/* From the command line. */
extern const char *harness_ballastd;
extern bool harness_full;

/* A fresh folder, no daemon yet. */
void harness_init(struct harness *harness);
/* Start ballastd through worker/spawn.c. */
void harness_start(struct harness *harness, bool restarted);
/* Link every rank; rank 0 tells its state and plan. */
void harness_link(struct harness *harness, bool restarted);
/* init, start and link. */
void harness_begin(struct harness *harness);
/* Every rank says goodbye, is acknowledged and closes; the daemon has to be gone within 2 s. */
void harness_end(struct harness *harness);
/* Wait for the daemon's exit; the seconds it took. Fails after `limit_s`. */
double harness_wait_exit(struct harness *harness, double limit_s, int expected_exit);
/* Kill what is left, remove the folder. */
void harness_fini(struct harness *harness);

void harness_open(struct harness *harness, struct raw_client *out_client);
/* Ask with only the body's case set to an empty message. */
Ballast__Control__V1__Reply *harness_ask(struct raw_client *client,
                                         Ballast__Control__V1__Request *request);
Ballast__Control__V1__Reply *harness_status(struct raw_client *client);
/* The next reply under this id; others are skipped. */
Ballast__Control__V1__Reply *harness_next(struct raw_client *client, uint64_t id);
void harness_expect_error(Ballast__Control__V1__Reply *reply, enum status status,
                          const char *part_of_text);
/* The next command that arrives at rank 0; frame_free() the message. */
Ballast__Link__V1__DaemonMessage *harness_command(struct harness *harness);
/* events.jsonl as it is now; free() it. */
char *harness_journal(const struct harness *harness);
/* Wait until status says this many steps. */
void harness_wait_step(struct raw_client *client, uint64_t step);
/* A few milliseconds, between two looks. */
void harness_pause(void);
int harness_count_descriptors(pid_t pid);
/* Resident bytes of a process. */
uint64_t harness_resident(pid_t pid);

#endif
