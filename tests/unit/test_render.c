/* Rendering: constructed messages against the text a person sees, escaping, wrapping, colours.
 * links: base messages proto client */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "client/render.h"
#include "client/table.h"
#include "proto/base/heap.h"
/* Last: its fail() is a macro. */
#include <cmocka.h>

static const struct style plain = {.width = STYLE_PLAIN_WIDTH};
static const struct style colored = {.color = true, .unicode = true, .width = 100};

#define MIB (UINT64_C(1) << 20)
#define LENGTH(array) (sizeof(array) / sizeof *(array))

/* Compare, and hold every plain text to its promises. */
static void check(struct text *text, const char *expected)
{
    assert_false(text->failed);
    for (const char *at = text_get(text); *at; at++)
        assert_true(*at == '\n' || (unsigned char)*at >= ' ');
    assert_string_equal(text_get(text), expected);
    text_fini(text);
}

static Ballast__V1__Setting setting(const char *key, const char *value)
{
    Ballast__V1__Setting message = BALLAST__V1__SETTING__INIT;
    message.key = (char *)key;
    message.value = (char *)value;
    return message;
}

static Ballast__V1__MemoryEntry entry(int tier, int category, uint64_t bytes)
{
    Ballast__V1__MemoryEntry message = BALLAST__V1__MEMORY_ENTRY__INIT;
    message.tier = (Ballast__V1__Tier)tier;
    message.category = (Ballast__V1__Category)category;
    message.bytes = bytes;
    return message;
}

static Ballast__V1__PhaseBytes phase_bytes(int phase, uint64_t bytes)
{
    Ballast__V1__PhaseBytes message = BALLAST__V1__PHASE_BYTES__INIT;
    message.phase = (Ballast__V1__Phase)phase;
    message.bytes = bytes;
    return message;
}

static Ballast__V1__LiveBuffer live_buffer(const char *name, int category, uint64_t bytes,
                                           uint32_t count)
{
    Ballast__V1__LiveBuffer message = BALLAST__V1__LIVE_BUFFER__INIT;
    message.name = (char *)name;
    message.tier = BALLAST__V1__TIER__TIER_DEVICE;
    message.category = (Ballast__V1__Category)category;
    message.bytes = bytes;
    message.count = count;
    return message;
}

/* One run in the middle of training: what all tests below look at. */
struct fixture {
    Ballast__V1__Setting settings[3], *strategy[3];
    Ballast__V1__Setting old_settings[3], *old_strategy[3];
    Ballast__V1__PhaseBytes peaks[2], *peak_list[2], planned[2], *planned_list[2];
    Ballast__V1__MemoryEntry entries[3], *entry_list[3];
    Ballast__V1__LiveBuffer buffers[2], *live[2];
    Ballast__V1__PhasePlan phases[2], *phase_list[2], old_phases[2], *old_phase_list[2];
    Ballast__V1__PlanSummary plan, old_plan;
    Ballast__V1__StepRecord step;
    Ballast__V1__RankState ranks[2], *rank_list[2];
    Ballast__Control__V1__StatusReply status;
};

static void make_strategies(struct fixture *f)
{
    f->settings[0] = setting("checkpointing", "block:1");
    f->settings[1] = setting("checkpointing.layers", "4");
    f->settings[2] = setting("micro_batch", "2");
    f->old_settings[0] = setting("checkpointing", "none");
    f->old_settings[1] = setting("checkpointing.layers", "4");
    f->old_settings[2] = setting("micro_batch", "2");
    for (size_t i = 0; i < 3; i++) {
        f->strategy[i] = &f->settings[i];
        f->old_strategy[i] = &f->old_settings[i];
    }
}

static void make_plan(struct fixture *f)
{
    f->entries[0] = entry(1, 1, 100 * MIB);
    f->entries[1] = entry(1, 4, 300 * MIB);
    f->entries[2] = entry(2, 3, 200 * MIB);
    f->buffers[0] = live_buffer("block.attention.out", 4, 225 * MIB, 4);
    f->buffers[1] = live_buffer("logits", 5, 75 * MIB, 1);
    for (size_t i = 0; i < 3; i++)
        f->entry_list[i] = &f->entries[i];
    for (size_t i = 0; i < 2; i++) {
        f->live[i] = &f->buffers[i];
        f->phases[i] = (Ballast__V1__PhasePlan)BALLAST__V1__PHASE_PLAN__INIT;
        f->phases[i].phase =
            i ? BALLAST__V1__PHASE__PHASE_BACKWARD : BALLAST__V1__PHASE__PHASE_FORWARD;
        f->phases[i].peak_bytes = (i ? 500 : 400) * MIB;
        f->phases[i].committed_bytes = (i ? 512 : 402) * MIB;
        f->phases[i].at_peak = f->entry_list;
        f->phases[i].n_at_peak = 3;
        f->phases[i].live = f->live;
        f->phases[i].n_live = 2;
        f->phase_list[i] = &f->phases[i];
        f->old_phases[i] = f->phases[i];
        f->old_phases[i].peak_bytes = (i ? 500 : 830) * MIB;
        f->old_phases[i].committed_bytes = (i ? 512 : 832) * MIB;
        f->old_phase_list[i] = &f->old_phases[i];
    }
    f->plan = (Ballast__V1__PlanSummary)BALLAST__V1__PLAN_SUMMARY__INIT;
    f->plan.strategy = f->strategy;
    f->plan.n_strategy = 3;
    f->plan.phases = f->phase_list;
    f->plan.n_phases = 2;
    f->plan.limit_bytes = 1024 * MIB;
    f->plan.packing_efficiency = 0.9987;
    f->plan.flops_per_step = 2.4e9;
    f->plan.accumulation = 4;
    f->plan.fits = true;
    f->plan.binding = (char *)"backward: activations";
    f->plan.n_parameters = 123712;
    f->plan.step_ms = 140.0;
    f->old_plan = f->plan;
    f->old_plan.strategy = f->old_strategy;
    f->old_plan.phases = f->old_phase_list;
    f->old_plan.flops_per_step = 2.0e9;
    f->old_plan.step_ms = 120.0;
}

static void make_step(struct fixture *f)
{
    for (int i = 0; i < 2; i++) {
        f->peaks[i] = phase_bytes(2 + i, (i ? 500 : 400) * MIB);
        f->planned[i] = f->peaks[i];
        f->peak_list[i] = &f->peaks[i];
        f->planned_list[i] = &f->planned[i];
    }
    f->step = (Ballast__V1__StepRecord)BALLAST__V1__STEP_RECORD__INIT;
    f->step.time = (char *)"2026-01-02T03:04:05.678Z";
    f->step.step = 249;
    f->step.loss = 4.12345;
    f->step.grad_norm = 0.987;
    f->step.lr = 3e-4;
    f->step.tokens = 8192;
    f->step.tokens_per_second = 12345.0;
    f->step.step_ms = 123.0;
    f->step.peak_bytes = f->peak_list;
    f->step.n_peak_bytes = 2;
    f->step.planned_bytes = f->planned_list;
    f->step.n_planned_bytes = 2;
    f->step.generation = 3;
    f->step.strategy = f->strategy;
    f->step.n_strategy = 3;
}

static void make_ranks(struct fixture *f)
{
    for (size_t i = 0; i < 2; i++) {
        Ballast__V1__RankState *rank = &f->ranks[i];
        *rank = (Ballast__V1__RankState)BALLAST__V1__RANK_STATE__INIT;
        rank->rank = (uint32_t)i;
        rank->host = (char *)"node1";
        rank->pid = 1000 + (int32_t)i;
        rank->phase = BALLAST__V1__PHASE__PHASE_BACKWARD;
        rank->step = 250;
        rank->micro_step = 1;
        rank->layer = i ? -1 : 2;
        rank->collective = (char *)(i ? "grads.reduce" : "");
        rank->collective_number = i ? 77 : 0;
        rank->memory = f->entry_list;
        rank->n_memory = 3;
        rank->committed_bytes = 512 * MIB;
        rank->limit_bytes = 1024 * MIB;
        rank->resident_bytes = 700 * MIB;
        rank->age_ms = i ? 6000 : 40;
        rank->linked = !i;
        f->rank_list[i] = rank;
    }
}

static void make(struct fixture *f)
{
    *f = (struct fixture){0};
    make_strategies(f);
    make_plan(f);
    make_step(f);
    make_ranks(f);
    f->status = (Ballast__Control__V1__StatusReply)BALLAST__CONTROL__V1__STATUS_REPLY__INIT;
    f->status.run_id = (char *)"bible-7";
    f->status.run_dir = (char *)"/data/runs/bible";
    f->status.model = (char *)"llama 4 layers, 1.2 M parameters";
    f->status.device = (char *)"cpu";
    f->status.world_size = 2;
    f->status.linked_ranks = 2;
    f->status.health = (char *)"OK";
    f->status.doing = (char *)"training";
    f->status.step = 250;
    f->status.n_steps = 1000;
    f->status.generation = 3;
    f->status.strategy = f->strategy;
    f->status.n_strategy = 3;
    f->status.last_step = &f->step;
    f->status.plan = &f->plan;
    f->status.disk_used_bytes = 12 * MIB;
    f->status.disk_free_bytes = 30 * 1024 * MIB;
    f->status.has_save = true;
    f->status.last_save_step = 200;
    f->status.uptime_ms = 61000;
}

static const char golden_status[] =
    "OK  training  run bible-7\n"
    "  directory  /data/runs/bible\n"
    "  model      llama 4 layers, 1.2 M parameters\n"
    "  device     cpu, 2 of 2 ranks linked\n"
    "  progress   250 of 1000 steps  [#####...............] 25.0 %, 1 min 32 s left"
    ", up 1 min 01 s\n"
    "  training   loss 4.1235, grad norm 0.987, lr 0.0003, 12.3 k tokens/s, 123 ms "
    "a step\n"
    "  strategy   checkpointing=block:1 checkpointing.layers=4 micro_batch=2 (gener"
    "ation 3)\n"
    "  disk       12.0 MiB used, 30.0 GiB free; last save at step 200\n"
    "\n"
    "  phase     planned  measured     limit  committed of limit\n"
    "  forward   400 MiB   400 MiB  1.00 GiB  [########............] 39 %\n"
    "  backward  500 MiB   500 MiB  1.00 GiB  [##########..........] 50 %\n";

static const char golden_trouble[] =
    "ERROR  paused  run bible-7\n"
    "  !          rank 1 has been silent for 6 s\n"
    "  directory  /data/runs/bible\n"
    "  model      llama 4 layers, 1.2 M parameters\n"
    "  device     cpu, 1 of 2 ranks linked\n"
    "  progress   250 steps, up 1 min 01 s\n"
    "  training   no step completed yet\n"
    "  strategy   checkpointing=block:1 checkpointing.layers=4 micro_batch=2 (gener"
    "ation 3)\n"
    "  disk       12.0 MiB used, 30.0 GiB free; no save yet\n";

static const char golden_memory[] =
    "rank 0 on node1, backward of step 250: committed 512 MiB of 1.00 GiB  [#######"
    "###..........] 50 %\n"
    "  tier     params  grads  optimizer  activations  temp  comm  external    tota"
    "l\n"
    "  device  100 MiB      -          -      300 MiB     -     -         -  400 Mi"
    "B\n"
    "  host          -      -    200 MiB            -     -     -         -  200 Mi"
    "B\n"
    "  resident in the process: 700 MiB\n"
    "\n"
    "rank 1 on node1, backward of step 250: committed 512 MiB of 1.00 GiB  [#######"
    "###..........] 50 %\n"
    "  not linked; these are its last known values\n"
    "  tier     params  grads  optimizer  activations  temp  comm  external    tota"
    "l\n"
    "  device  100 MiB      -          -      300 MiB     -     -         -  400 Mi"
    "B\n"
    "  host          -      -    200 MiB            -     -     -         -  200 Mi"
    "B\n"
    "  resident in the process: 700 MiB\n"
    "\n"
    "peaks of the last step, highest rank\n"
    "  phase        peak  of limit\n"
    "  forward   400 MiB  [########............] 39 %\n"
    "  backward  500 MiB  [##########..........] 49 %\n";

static const char golden_at_peak[] =
    "forward peak: 400 MiB in use, committed 402 MiB of 1.00 GiB  [########........"
    "....] 39 %\n"
    "  tier     params  grads  optimizer  activations  temp  comm  external    tota"
    "l\n"
    "  device  100 MiB      -          -      300 MiB     -     -         -  400 Mi"
    "B\n"
    "  host          -      -    200 MiB            -     -     -         -  200 Mi"
    "B\n"
    "\n"
    "alive at the peak, largest first\n"
    "     bytes  share           tier    category     count  buffer\n"
    "   225 MiB  [#########...]  device  activations      4  block.attention.out\n"
    "  75.0 MiB  [###.........]  device  temp             1  logits\n";

static const char golden_ranks[] =
    "rank    host    pid  phase      step  layer  collective         in use  commit"
    "ted     limit      age\n"
    "0       node1  1000  backward  250.1      2  -                 400 MiB    512 "
    "MiB  1.00 GiB  40.0 ms\n"
    "1 lost  node1  1001  backward  250.1      -  grads.reduce #77  400 MiB    512 "
    "MiB  1.00 GiB   6.00 s\n";

static const char golden_steps[] =
    "step    loss  grad norm      lr  tokens/s    time     peak  generation  strate"
    "gy\n"
    " 249  4.1235      0.987  0.0003    12.3 k  123 ms  500 MiB           3  checkp"
    "ointing=block:1\n"
    "                                                                        checkp"
    "ointing.layers=4\n"
    "                                                                        micro_"
    "batch=2\n";

static const char golden_events[] =
    "time                      type    step  rank  who    text\n"
    "2026-01-02T03:04:05.678Z  switch    41  -     uid 0  checkpointing none -> blo"
    "ck:1 in 12 ms, forward\n"
    "                                                     830 MiB -> 400 MiB, all r"
    "anks agreed\n"
    "2026-01-02T03:04:05.678Z  oom     1200  1     -      a\\nb\n";

static const char golden_plan[] =
    "strategy checkpointing=block:1 checkpointing.layers=4 micro_batch=2\n"
    "phase      params  grads  optimizer  activations  temp  comm  external     pea"
    "k  used\n"
    "forward   100 MiB      -          -      300 MiB     -     -         -  400 Mi"
    "B  39 %\n"
    "backward  100 MiB      -          -      300 MiB     -     -         -  500 Mi"
    "B  50 %\n"
    "host memory: up to 200 MiB\n"
    "fits in 1.00 GiB; what binds is backward: activations\n"
    "124 k parameters, 4 micro-steps a step, 2.40 GFLOP a step, 0 B exchanged\n"
    "estimated step time 140 ms\n"
    "packing efficiency of the workspace 99.87 %\n";

static const char golden_comparison[] =
    "checkpointing none -> block:1\n"
    "phase      before    after    change     limit  committed of limit, after\n"
    "forward   830 MiB  400 MiB  -430 MiB  1.00 GiB  [########............] 39 %\n"
    "backward  500 MiB  500 MiB         -  1.00 GiB  [##########..........] 50 %\n"
    "host memory: up to 200 MiB -> 200 MiB\n"
    "fits in 1.00 GiB; what binds is backward: activations\n"
    "estimated step time 120 ms -> 140 ms\n"
    "floating-point operations a step +20.0 %\n";

static const char golden_oom[] =
    "out of memory in backward of step 12, micro-step 2, rank 1, 2026-01-02T03:04:0"
    "5.678Z\n"
    "  asked     64.0 MiB for block.2.mlp.gate (activations, device)\n"
    "  held      992 MiB of 1.00 GiB  [###################.] 97 %\n"
    "  cause     capacity\n"
    "  outcome   the run ended, saved at step 12\n"
    "\n"
    "who held what\n"
    "  tier     params  grads  optimizer  activations  temp  comm  external    tota"
    "l\n"
    "  device  100 MiB      -          -      300 MiB     -     -         -  400 Mi"
    "B\n"
    "  host          -      -    200 MiB            -     -     -         -  200 Mi"
    "B\n"
    "\n"
    "alive then, largest first\n"
    "     bytes  share           tier    category     count  buffer\n"
    "   225 MiB  [#########...]  device  activations      4  block.attention.out\n"
    "  75.0 MiB  [###.........]  device  temp             1  logits\n"
    "\n"
    "plan against actual\n"
    "  phase     planned   actual\n"
    "  forward   400 MiB  400 MiB\n"
    "  backward  500 MiB        -\n"
    "\n"
    "remedies, best first\n"
    "     change                 fits  forward  backward  step  what it does\n"
    "  1  checkpointing=block:1  yes   400 MiB   500 MiB     -  recomputes every bl"
    "ock\n";

static const char golden_watch[] =
    "   step  doing         loss grad norm tokens/s step time     peak  strategy\n"
    "    250  training    4.1235     0.987   12.3 k    123 ms  500 MiB  (2 samples "
    "lost) checkpointing...\n";

static const char golden_watch_paused[] =
    "    250  paused           -         -        -         -        -  WARN checkp"
    "ointing=block:1 che...\n";

static void status_screen(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_status(&f.status, &plain, &text);
    check(&text, golden_status);
}

static void status_of_a_run_in_trouble(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    char *reasons[] = {(char *)"rank 1 has been silent for 6 s"};
    f.status.health = (char *)"ERROR";
    f.status.reasons = reasons;
    f.status.n_reasons = 1;
    f.status.linked_ranks = 1;
    f.status.paused = true;
    f.status.n_steps = 0;
    f.status.last_step = NULL;
    f.status.plan = NULL;
    f.status.has_save = false;
    struct text text = {0};
    render_status(&f.status, &plain, &text);
    check(&text, golden_trouble);
}

static void a_peak_off_its_plan_is_marked(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    f.peaks[1].bytes += 256;
    struct text text = {0};
    render_status(&f.status, &plain, &text);
    assert_non_null(strstr(text_get(&text), "! 500 MiB"));
    assert_null(strstr(text_get(&text), "! 400 MiB"));
    text_fini(&text);
}

static void memory_live(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__Control__V1__MemoryReply memory = BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
    memory.ranks = f.rank_list;
    memory.n_ranks = 2;
    memory.peak_bytes = f.peak_list;
    memory.n_peak_bytes = 2;
    memory.limit_bytes = 1024 * MIB;
    struct text text = {0};
    render_memory(&memory, &plain, &text);
    check(&text, golden_memory);
}

static void memory_at_peak(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__Control__V1__MemoryReply memory = BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
    memory.at_peak = &f.phases[0];
    memory.limit_bytes = 1024 * MIB;
    struct text text = {0};
    render_memory(&memory, &plain, &text);
    check(&text, golden_at_peak);
}

static void ranks_table(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_ranks(f.rank_list, 2, &plain, &text);
    check(&text, golden_ranks);
}

static void steps_table(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__V1__StepRecord *list[] = {&f.step};
    struct text text = {0};
    render_steps(list, 1, &plain, &text);
    check(&text, golden_steps);
}

static void events_table_wraps_its_text(void **state)
{
    (void)state;
    Ballast__V1__Event first = BALLAST__V1__EVENT__INIT, second = BALLAST__V1__EVENT__INIT;
    first.time = second.time = (char *)"2026-01-02T03:04:05.678Z";
    first.type = (char *)"switch";
    first.step = 41;
    first.rank = -1;
    first.who = (char *)"uid 0";
    first.text = (char *)"checkpointing none -> block:1 in 12 ms, forward 830 MiB -> 400 MiB, all "
                         "ranks agreed";
    second.type = (char *)"oom";
    second.step = 1200;
    second.rank = 1;
    second.text = (char *)"a\nb";
    Ballast__V1__Event *list[] = {&first, &second};
    struct text text = {0};
    render_events(list, 2, &plain, &text);
    check(&text, golden_events);
    render_event_line(&second, &plain, &text);
    check(&text, "2026-01-02T03:04:05.678Z  oom  step 1200  rank 1  a\\nb\n");
}

static void plan_of_now(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_plan(&f.plan, &plain, &text);
    check(&text, golden_plan);
}

static void comparison_before_and_after(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_comparison(&f.old_plan, &f.plan, &plain, &text);
    check(&text, golden_comparison);
}

static void change_in_one_line(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__Control__V1__CommandReply reply = BALLAST__CONTROL__V1__COMMAND_REPLY__INIT;
    reply.generation = 3;
    reply.step = 41;
    reply.before = &f.old_plan;
    reply.after = &f.plan;
    reply.released_bytes = 430 * MIB;
    reply.took_ms = 12.0;
    struct text text = {0};
    render_change(&reply, &text);
    check(&text, "generation 3 from step 41: checkpointing none -> block:1; "
                 "forward 830 MiB -> 400 MiB; released 430 MiB in 12.0 ms\n");
    reply.before = NULL;
    reply.released_bytes = 0;
    reply.took_ms = 0.0;
    reply.text = (char *)"nothing to do";
    render_change(&reply, &text);
    check(&text, "generation 3 from step 41: nothing to do\n");
}

static void oom_report(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__V1__Remedy remedy = BALLAST__V1__REMEDY__INIT, *remedies[] = {&remedy};
    Ballast__V1__Setting change = setting("checkpointing", "block:1"), *changes[] = {&change};
    remedy.changes = changes;
    remedy.n_changes = 1;
    remedy.peak_bytes = f.peak_list;
    remedy.n_peak_bytes = 2;
    remedy.text = (char *)"recomputes every block";
    remedy.fits = true;
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    report.step = 12;
    report.rank = 1;
    report.micro_step = 2;
    report.phase = BALLAST__V1__PHASE__PHASE_BACKWARD;
    report.tensor = (char *)"block.2.mlp.gate";
    report.category = BALLAST__V1__CATEGORY__CATEGORY_ACTIVATIONS;
    report.tier = BALLAST__V1__TIER__TIER_DEVICE;
    report.asked_bytes = 64 * MIB;
    report.held_bytes = 992 * MIB;
    report.limit_bytes = 1024 * MIB;
    report.held = f.entry_list;
    report.n_held = 3;
    report.live = f.live;
    report.n_live = 2;
    report.planned_bytes = f.planned_list;
    report.n_planned_bytes = 2;
    report.actual_bytes = f.peak_list;
    report.n_actual_bytes = 1;
    report.remedies = remedies;
    report.n_remedies = 1;
    report.cause = (char *)"capacity";
    report.outcome = (char *)"the run ended, saved at step 12";
    report.time = (char *)"2026-01-02T03:04:05.678Z";
    struct text text = {0};
    render_oom(&report, &plain, &text);
    check(&text, golden_oom);
    report.n_remedies = 0;
    render_oom(&report, &plain, &text);
    assert_non_null(strstr(text_get(&text), "none known"));
    text_fini(&text);
}

static void watch_lines(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    Ballast__Control__V1__WatchReply watch = BALLAST__CONTROL__V1__WATCH_REPLY__INIT;
    watch.status = &f.status;
    watch.dropped = 2;
    struct text text = {0};
    render_watch_line(&watch, true, &plain, &text);
    check(&text, golden_watch);
    watch.dropped = 0;
    f.status.last_step = NULL;
    f.status.paused = true;
    f.status.health = (char *)"WARN";
    render_watch_line(&watch, false, &plain, &text);
    check(&text, golden_watch_paused);
}

/* Whatever a daemon sends, a terminal shows it and does not obey it. */
static void strings_from_the_wire_are_escaped(void **state)
{
    (void)state;
    static const struct {
        const char *wire, *shown;
    } cases[] = {
        {"plain", "plain"},
        {"\033[2J\033]0;x\007", "\\x1b[2J\\x1b]0;x\\x07"},
        {"a\r\nb\tc", "a\\x0d\\nb\\tc"},
        {"\x7f", "\\x7f"},
        {"\xc2\x9b"
         "31m",
         "\\u009b31m"}, /* C1 CSI */
        {"\xe2\x80\xae"
         "cba",
         "\\u202ecba"},              /* right-to-left override */
        {"\xe2\x80\x8b", "\\u200b"}, /* zero width */
        {"gr\xc3\xb6\xc3\x9f"
         "e",
         "gr\xc3\xb6\xc3\x9f"
         "e"},
        {"\xff\xc3", "\\xff\\xc3"}, /* broken UTF-8 */
        {"\xc0\x8a", "\\xc0\\x8a"}, /* overlong newline */
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct text text = {0};
        text_put_wire(&text, cases[i].wire);
        assert_string_equal(text_get(&text), cases[i].shown);
        text_fini(&text);
    }
    struct fixture f;
    make(&f);
    f.status.run_id = f.status.run_dir = f.status.model = f.status.device = (char *)"\033[31mx\n";
    f.status.doing = f.status.health = (char *)"\007";
    f.settings[0].value = (char *)"\033c";
    f.ranks[0].host = f.ranks[1].collective = (char *)"\033\n";
    Ballast__Control__V1__WatchReply watch = BALLAST__CONTROL__V1__WATCH_REPLY__INIT;
    watch.status = &f.status;
    watch.ranks = f.rank_list;
    watch.n_ranks = 2;
    struct text text = {0};
    render_watch_screen(&watch, &plain, &text);
    render_watch_line(&watch, true, &plain, &text);
    for (const char *at = text_get(&text); *at; at++)
        assert_true(*at == '\n' || (unsigned char)*at >= ' ');
    text_fini(&text);
}

static void colours_only_when_asked(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_status(&f.status, &colored, &text);
    assert_non_null(strstr(text_get(&text), "\033[32mOK\033[0m"));
    assert_non_null(strstr(text_get(&text), "\u2588"));
    text_fini(&text);
}

static void plain_text_keeps_to_its_width(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    struct text text = {0};
    render_status(&f.status, &plain, &text);
    render_plan(&f.plan, &plain, &text);
    render_comparison(&f.old_plan, &f.plan, &plain, &text);
    render_ranks(f.rank_list, 2, &plain, &text);
    for (const char *line = text_get(&text); *line;) {
        size_t n = strcspn(line, "\n");
        assert_true(text_columns(line, n) <= STYLE_PLAIN_WIDTH);
        line += n + 1;
    }
    text_fini(&text);
}

/* What a newer daemon may leave out or add must not bring the client down. */
static void empty_messages_are_shown(void **state)
{
    (void)state;
    Ballast__Control__V1__StatusReply status = BALLAST__CONTROL__V1__STATUS_REPLY__INIT;
    Ballast__Control__V1__MemoryReply memory = BALLAST__CONTROL__V1__MEMORY_REPLY__INIT;
    Ballast__Control__V1__WatchReply watch = BALLAST__CONTROL__V1__WATCH_REPLY__INIT;
    Ballast__Control__V1__CommandReply command = BALLAST__CONTROL__V1__COMMAND_REPLY__INIT;
    Ballast__V1__PlanSummary plan = BALLAST__V1__PLAN_SUMMARY__INIT;
    Ballast__V1__OomReport report = BALLAST__V1__OOM_REPORT__INIT;
    struct text text = {0};
    render_status(&status, &plain, &text);
    render_memory(&memory, &plain, &text);
    render_watch_line(&watch, true, &plain, &text);
    render_watch_screen(&watch, &plain, &text);
    render_ranks(NULL, 0, &plain, &text);
    render_steps(NULL, 0, &plain, &text);
    render_events(NULL, 0, &plain, &text);
    render_plan(&plan, &plain, &text);
    render_comparison(&plan, &plan, &plain, &text);
    render_change(&command, &text);
    render_oom(&report, &plain, &text);
    assert_false(text.failed);
    assert_non_null(strstr(text_get(&text), "no step completed yet"));
    assert_non_null(strstr(text_get(&text), "no rank has reported yet"));
    text_fini(&text);
    assert_string_equal(render_phase((Ballast__V1__Phase)99), "-");
}

/* Every allocation fails once: the text says so and nothing leaks. */
static void out_of_memory_is_seen(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    int64_t live = heap_live();
    for (uint64_t nth = 1;; nth++) {
        struct text text = {0};
        heap_fail(nth, false);
        render_status(&f.status, &plain, &text);
        render_ranks(f.rank_list, 2, &plain, &text);
        render_live(f.live, 2, 0, &plain, &text);
        bool failed = heap_failures() > 0;
        heap_fail(0, false);
        assert_int_equal(text.failed, failed);
        text_fini(&text);
        assert_int_equal(heap_live(), live);
        if (!failed)
            break;
        assert_true(nth < 10000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_screen),
        cmocka_unit_test(status_of_a_run_in_trouble),
        cmocka_unit_test(a_peak_off_its_plan_is_marked),
        cmocka_unit_test(memory_live),
        cmocka_unit_test(memory_at_peak),
        cmocka_unit_test(ranks_table),
        cmocka_unit_test(steps_table),
        cmocka_unit_test(events_table_wraps_its_text),
        cmocka_unit_test(plan_of_now),
        cmocka_unit_test(comparison_before_and_after),
        cmocka_unit_test(change_in_one_line),
        cmocka_unit_test(oom_report),
        cmocka_unit_test(watch_lines),
        cmocka_unit_test(strings_from_the_wire_are_escaped),
        cmocka_unit_test(colours_only_when_asked),
        cmocka_unit_test(plain_text_keeps_to_its_width),
        cmocka_unit_test(empty_messages_are_shown),
        cmocka_unit_test(out_of_memory_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
