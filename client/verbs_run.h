/* What each verb does once the session is open (`wait` opens its own), and what two of them do
 * from the run's files when there is no daemon (files_...). Every function returns the exit code;
 * one that is not OK has its reason in call->session.why. */
#ifndef BALLAST_CLIENT_VERBS_RUN_H
#define BALLAST_CLIENT_VERBS_RUN_H

#include "client/verbs.h"

/* verbs_query.c: questions, one answer each. */
enum exit_code verb_status(struct call *call);
enum exit_code verb_memory(struct call *call);
enum exit_code verb_ranks(struct call *call);
enum exit_code verb_steps(struct call *call);
enum exit_code verb_plan(struct call *call);
enum exit_code verb_oom(struct call *call);
enum exit_code files_oom(struct call *call);
enum exit_code verb_schema(struct call *call);
/* verbs_stream.c: answers that go on. */
enum exit_code verb_events(struct call *call);
enum exit_code files_events(struct call *call);
enum exit_code verb_watch(struct call *call);
/* verbs_command.c: what changes the run. */
enum exit_code verb_set(struct call *call);
enum exit_code verb_undo(struct call *call);
enum exit_code verb_save(struct call *call);
enum exit_code verb_eval(struct call *call);
enum exit_code verb_pause(struct call *call);
enum exit_code verb_resume(struct call *call);
enum exit_code verb_stop(struct call *call);
/* verbs_wait.c */
enum exit_code verb_wait(struct call *call);
/* verbs.c */
enum exit_code verb_help(struct call *call);

enum status check_changes(struct arguments *arguments, const char *for_text, struct failure *why);
enum status check_resume(struct arguments *arguments, const char *for_text, struct failure *why);
enum status check_condition(struct arguments *arguments, const char *for_text, struct failure *why);

/* The operands KEY=VALUE as settings. */
struct changes {
    Ballast__V1__Setting items[ARGUMENTS_MAX_CHANGES];
    Ballast__V1__Setting *pointers[ARGUMENTS_MAX_CHANGES];
    char keys[ARGUMENTS_MAX_CHANGES][ARGUMENTS_KEY_BYTES];
    size_t n;
};
void changes_from_operands(const struct arguments *arguments, struct changes *out_changes);

#endif
