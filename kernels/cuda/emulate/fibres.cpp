/* Runs the blocks of an emulated launch: see fibres.h.
 *
 * A warp runs until each of its lanes has returned or waits for the block; a lane that comes
 * to an operation of the warp waits until all lanes of its mask have come to it. When all
 * warps have stopped, either all threads wait at the same barrier, which opens, or all have
 * returned, or the kernel is wrong.
 *
 *     NEW -> RUN                [resume]
 *     RUN -> WARP, BLOCK, DONE  [leave, by the fibre itself]
 *     WARP -> RUN               [open_warp]
 *     BLOCK -> RUN              [open_block]
 *
 * State is per operating-system thread, made at its first launch and kept until it ends. A fibre
 * that returns gives its stack to the next, so a kernel without barriers uses one. */
#include "kernels/cuda/emulate/fibres.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__has_feature)
#define FIBRES_FEATURE(name) __has_feature(name)
#else
#define FIBRES_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || FIBRES_FEATURE(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define FIBRES_ASAN 1
#else
#define FIBRES_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__) || FIBRES_FEATURE(thread_sanitizer)
#include <sanitizer/tsan_interface.h>
#define FIBRES_TSAN 1
#else
#define FIBRES_TSAN 0
#endif

#if defined(__x86_64__) && !defined(BALLAST_FIBRES_UCONTEXT)
#define FIBRES_UCONTEXT 0
#else
#include <ucontext.h>
#define FIBRES_UCONTEXT 1
#endif

__thread struct uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

enum {
    WARP_LANES = 32,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / WARP_LANES,
    MAX_SHARED_BYTES = 227 * 1024,
    GUARD_BYTES = 64 * 1024, /* a multiple of any page */
    STACK_BYTES = (FIBRES_ASAN || FIBRES_TSAN) ? 512 * 1024 : 128 * 1024,
    COPY_BYTES = 16
};

enum fibre_state { FIBRE_NEW, FIBRE_RUN, FIBRE_WARP, FIBRE_BLOCK, FIBRE_DONE };

/* One cp.async that has not landed. */
struct copy {
    void *shared;
    const void *global; /* NULL: zeros */
    uint64_t group;
};

/* In order of issue, so in order of their groups. */
struct copies {
    struct copy *list;
    size_t n, room;
    uint64_t n_committed;
};

#if FIBRES_UCONTEXT
typedef ucontext_t fibre_context;
#else
typedef void *fibre_context; /* the stack pointer */
#endif

struct stack {
    unsigned char *base;
    size_t bytes;
    void *race_state; /* ThreadSanitizer's; kept with the stack: making one takes a millisecond */
};

struct fibre {
    enum fibre_state state;
    struct uint3 index;
    fibre_context context;
    struct stack stack; /* from the pool while it runs */
    void *fake_stack;   /* AddressSanitizer's */
    struct fibre_place place;
    struct fibre_warp_call *call; /* on the fibre's stack, while WARP */
    struct copies copies;
};

enum fibre_order { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };

struct emulator {
    const struct fibre_launch *launch; /* NULL: none runs */
    void (*thread)(const void *closure);
    const void *closure;
    unsigned char *shared;
    int n_threads;
    struct fibre *current; /* NULL: the scheduler */
    enum fibre_order order;
    uint64_t random, n_launches;
    fibre_context scheduler;
    void *fake_stack, *race_state;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    struct stack stacks[MAX_THREADS]; /* the pool of those not in use */
    int n_stacks, n_made;
    struct fibre fibres[MAX_THREADS];
};

__thread struct emulator *emulator;

void print_launch(const struct fibre_launch *launch)
{
    fprintf(stderr, "fibres: kernel %s", launch->name);
}

/* ---- switching stacks ---- */

void fibre_main(void);

#if FIBRES_UCONTEXT

void context_make(fibre_context *context, const struct stack *stack)
{
    if (getcontext(context) != 0) {
        fibre_die("getcontext failed");
    }
    context->uc_stack.ss_sp = stack->base;
    context->uc_stack.ss_size = stack->bytes;
    context->uc_link = NULL;
    makecontext(context, fibre_main, 0);
}

void context_switch(fibre_context *save, fibre_context *load)
{
    if (swapcontext(save, load) != 0) {
        fibre_die("swapcontext failed");
    }
}

#else

/* Saves the registers a call preserves on the stack, and the stack's address in *save. */
extern "C" void ballast_fibre_switch(void **save, void *load);
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden ballast_fibre_switch\n"
        ".globl ballast_fibre_switch\n"
        ".type ballast_fibre_switch, @function\n"
        "ballast_fibre_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size ballast_fibre_switch, . - ballast_fibre_switch\n");

void context_make(fibre_context *context, const struct stack *stack)
{
    enum { SAVED_REGISTERS = 6 };
    /* fibre_main is entered by `ret`, as if called from address 0, where a walk of the stack
     * ends. The stack is then aligned as after a call. */
    void **top = (void **)(stack->base + stack->bytes);
    *--top = NULL;
    *--top = (void *)fibre_main;
    for (int i = 0; i < SAVED_REGISTERS; i++) {
        *--top = NULL;
    }
    *context = top;
}

void context_switch(fibre_context *save, fibre_context *load)
{
    ballast_fibre_switch(save, *load);
}

#endif

struct stack stack_get(struct emulator *e)
{
    if (e->n_stacks > 0) {
        return e->stacks[--e->n_stacks];
    }
    void *base = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, GUARD_BYTES, PROT_NONE) != 0) {
        fibre_die("no memory for a stack of %d bytes", STACK_BYTES);
    }
    /* Tops that lie alike in their pages would share few sets of the caches. */
    const size_t bytes = STACK_BYTES - 256 * (size_t)(e->n_made++ % 32);
    struct stack stack = {(unsigned char *)base + GUARD_BYTES, bytes, NULL};
#if FIBRES_TSAN
    stack.race_state = __tsan_create_fiber(0);
#endif
    return stack;
}

/* Give up control, in the given state. Returns when the scheduler resumes the fibre. */
void leave(enum fibre_state state)
{
    struct emulator *e = emulator;
    struct fibre *fibre = e->current;
    fibre->state = state;
#if FIBRES_ASAN
    __sanitizer_start_switch_fiber(state == FIBRE_DONE ? NULL : &fibre->fake_stack,
                                   e->scheduler_stack, e->scheduler_stack_bytes);
#endif
#if FIBRES_TSAN
    __tsan_switch_to_fiber(e->race_state, 0);
#endif
    context_switch(&fibre->context, &e->scheduler);
#if FIBRES_ASAN
    __sanitizer_finish_switch_fiber(fibre->fake_stack, NULL, NULL);
#endif
}

/* The first frame of a fibre. Never returns. */
void fibre_main(void)
{
    struct emulator *e = emulator;
#if FIBRES_ASAN
    __sanitizer_finish_switch_fiber(NULL, &e->scheduler_stack, &e->scheduler_stack_bytes);
#endif
    e->thread(e->closure);
    leave(FIBRE_DONE);
    abort();
}

/* Let a fibre run until it leaves. */
void resume(struct emulator *e, struct fibre *fibre)
{
    if (fibre->state == FIBRE_NEW) {
        fibre->stack = stack_get(e);
        context_make(&fibre->context, &fibre->stack);
        fibre->state = FIBRE_RUN;
    }
    e->current = fibre;
    threadIdx = fibre->index;
#if FIBRES_ASAN
    __sanitizer_start_switch_fiber(&e->fake_stack, fibre->stack.base, fibre->stack.bytes);
#endif
#if FIBRES_TSAN
    e->race_state = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fibre->stack.race_state, 0);
#endif
    context_switch(&e->scheduler, &fibre->context);
#if FIBRES_ASAN
    __sanitizer_finish_switch_fiber(e->fake_stack, NULL, NULL);
#endif
    e->current = NULL;
    if (fibre->state == FIBRE_DONE) {
        e->stacks[e->n_stacks++] = fibre->stack;
    }
}

/* ---- order ---- */

uint64_t draw(struct emulator *e)
{
    uint64_t x = e->random += 0x9E3779B97F4A7C15u; /* splitmix64 */
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

void choose_order(struct emulator *e)
{
    const char *text = getenv("BALLAST_FIBRES_ORDER");
    char *end = NULL;
    e->n_launches++;
    if (text == NULL || *text == '\0' || strcmp(text, "forward") == 0) {
        e->order = ORDER_FORWARD;
        return;
    }
    if (strcmp(text, "reverse") == 0) {
        e->order = ORDER_REVERSE;
        return;
    }
    e->order = ORDER_RANDOM;
    e->random = strtoull(text, &end, 10) + (e->n_launches << 32);
    if (*end != '\0') {
        fibre_die("BALLAST_FIBRES_ORDER is \"%s\"; use forward, reverse or a number", text);
    }
}

/* A permutation of 0 .. n-1: i -> (first + i * stride) mod n. */
struct permutation {
    uint64_t first, stride, n;
};

uint64_t divisor(uint64_t a, uint64_t b)
{
    return b == 0 ? a : divisor(b, a % b);
}

struct permutation permute(struct emulator *e, uint64_t n)
{
    if (e->order == ORDER_FORWARD || n < 2) {
        return {0, 1, n};
    }
    if (e->order == ORDER_REVERSE) {
        return {n - 1, n - 1, n};
    }
    uint64_t stride = 1 + draw(e) % (n - 1);
    while (divisor(stride, n) != 1) {
        stride = stride % (n - 1) + 1;
    }
    return {draw(e) % n, stride, n};
}

uint64_t permuted(const struct permutation *p, uint64_t i)
{
    if (p->stride == 1 && p->first == 0) {
        return i;
    }
    if (p->n <= UINT32_MAX) {
        return (p->first + i * p->stride) % p->n;
    }
    return (uint64_t)((p->first + (unsigned __int128)i * p->stride) % p->n);
}

/* ---- a warp ---- */

const char *where(const struct fibre *fibre)
{
    static __thread char text[256];
    if (fibre->state == FIBRE_DONE) {
        return "has returned";
    }
    snprintf(text, sizeof text, "waits in %s at %s:%d", fibre->place.what, fibre->place.file,
             fibre->place.line);
    return text;
}

bool same_text(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

bool same_place(const struct fibre_place *a, const struct fibre_place *b)
{
    return a->line == b->line && same_text(a->file, b->file) && same_text(a->what, b->what);
}

/* Lane `other` of the warp is not where lane `lane` waits for it. */
[[noreturn]] void die_apart(const struct fibre *warp, int lane, int other)
{
    const struct fibre *fibre = &warp[lane];
    const struct fibre_warp_call *call = fibre->call;
    const bool masks = warp[other].state == FIBRE_WARP && call->mask != warp[other].call->mask;
    threadIdx = fibre->index;
    fibre_die("lane %d waits in %s at %s:%d, mask 0x%08X, for lane %d, which %s%s", lane,
              call->place.what, call->place.file, call->place.line, call->mask, other,
              where(&warp[other]), masks ? " with another mask" : "");
}

/* The lanes that `lane` waits for are there too: the operation may be done. With `die`, say
 * who is missing. */
bool warp_complete(const struct fibre *warp, int n, int lane, bool die)
{
    const struct fibre_warp_call *call = warp[lane].call;
    for (int i = 0; i < n; i++) {
        if ((call->mask >> i & 1) == 0) {
            continue;
        }
        const struct fibre *other = &warp[i];
        const bool meets = other->state == FIBRE_WARP && other->call->mask == call->mask &&
                           (call->aligned || other->call->aligned
                                ? same_place(&call->place, &other->call->place)
                                : same_text(call->place.what, other->call->place.what));
        if (!meets && die) {
            die_apart(warp, lane, i);
        }
        if (!meets) {
            return false;
        }
    }
    return true;
}

/* Do the operations that all their lanes have come to. False: there are none. */
bool open_warp(struct emulator *e, struct fibre *warp, int n)
{
    bool opened = false;
    for (int lane = 0; lane < n; lane++) {
        if (warp[lane].state != FIBRE_WARP || !warp_complete(warp, n, lane, false)) {
            continue;
        }
        struct fibre_warp_call *calls[WARP_LANES] = {};
        const uint32_t mask = warp[lane].call->mask;
        for (int i = 0; i < n; i++) {
            if ((mask >> i & 1) != 0) {
                calls[i] = warp[i].call;
                warp[i].state = FIBRE_RUN;
            }
        }
        e->current = &warp[lane];
        threadIdx = warp[lane].index;
        calls[lane]->perform(calls);
        e->current = NULL;
        opened = true;
    }
    return opened;
}

/* Until every lane waits for the block or has returned. */
void run_warp(struct emulator *e, struct fibre *warp, int n)
{
    for (;;) {
        const struct permutation order = permute(e, (uint64_t)n);
        for (int i = 0; i < n; i++) {
            struct fibre *fibre = &warp[permuted(&order, (uint64_t)i)];
            if (fibre->state == FIBRE_NEW || fibre->state == FIBRE_RUN) {
                resume(e, fibre);
            }
        }
        int waiting = -1;
        for (int i = 0; i < n && waiting < 0; i++) {
            waiting = warp[i].state == FIBRE_WARP ? i : -1;
        }
        if (waiting < 0) {
            return;
        }
        if (!open_warp(e, warp, n)) {
            warp_complete(warp, n, waiting, true);
        }
    }
}

/* ---- a block ---- */

/* All threads wait at one barrier, which opens, or false: all have returned. */
bool open_block(struct emulator *e)
{
    struct fibre *const fibres = e->fibres;
    struct fibre *waiting = NULL;
    for (int i = 0; i < e->n_threads && waiting == NULL; i++) {
        waiting = fibres[i].state == FIBRE_BLOCK ? &fibres[i] : NULL;
    }
    if (waiting == NULL) {
        return false;
    }
    for (int i = 0; i < e->n_threads; i++) {
        struct fibre *fibre = &fibres[i];
        if (fibre->state == FIBRE_DONE || !same_place(&fibre->place, &waiting->place)) {
            threadIdx = waiting->index;
            fibre_die("waits in %s at %s:%d for thread (%u, %u, %u), which %s", waiting->place.what,
                      waiting->place.file, waiting->place.line, fibre->index.x, fibre->index.y,
                      fibre->index.z, where(fibre));
        }
        fibre->state = FIBRE_RUN;
    }
    return true;
}

void run_block(struct emulator *e)
{
    const int n = e->n_threads, n_warps = (n + WARP_LANES - 1) / WARP_LANES;
    if (e->launch->shared_bytes > 0) {
        memset(e->shared, 0xFF, e->launch->shared_bytes); /* NaN of either type */
    }
    for (int i = 0; i < n; i++) {
        e->fibres[i].state = FIBRE_NEW;
        e->fibres[i].copies.n = 0;
        e->fibres[i].copies.n_committed = 0;
    }
    do {
        const struct permutation order = permute(e, (uint64_t)n_warps);
        for (int i = 0; i < n_warps; i++) {
            const int first = (int)permuted(&order, (uint64_t)i) * WARP_LANES;
            run_warp(e, e->fibres + first, n - first < WARP_LANES ? n - first : WARP_LANES);
        }
    } while (open_block(e));
}

/* When its thread ends. */
void emulator_free(void *object)
{
    struct emulator *e = (struct emulator *)object;
    for (int i = 0; i < e->n_stacks; i++) {
#if FIBRES_TSAN
        __tsan_destroy_fiber(e->stacks[i].race_state);
#endif
        munmap(e->stacks[i].base - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    }
    for (int i = 0; i < MAX_THREADS; i++) {
        free(e->fibres[i].copies.list);
    }
    free(e);
    emulator = NULL;
}

pthread_key_t emulator_key;

void emulator_make_key(void)
{
    if (pthread_key_create(&emulator_key, emulator_free) != 0) {
        fibre_die("pthread_key_create failed");
    }
}

struct emulator *get_emulator(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (emulator != NULL) {
        return emulator;
    }
    pthread_once(&once, emulator_make_key);
    emulator = (struct emulator *)calloc(1, sizeof *emulator);
    if (emulator == NULL || pthread_setspecific(emulator_key, emulator) != 0) {
        fibre_die("no memory for %zu bytes", sizeof *emulator);
    }
    return emulator;
}

struct fibre *current_fibre(const char *what)
{
    if (emulator == NULL || emulator->current == NULL) {
        fprintf(stderr, "fibres: %s outside a kernel\n", what);
        abort();
    }
    return emulator->current;
}

} /* namespace */

void fibre_die(const char *format, ...)
{
    va_list list;
    if (emulator != NULL && emulator->launch != NULL) {
        print_launch(emulator->launch);
        fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    } else {
        fputs("fibres: ", stderr);
    }
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    abort();
}

void fibre_check_launch(const struct fibre_launch *launch)
{
    const struct uint3 g = launch->grid, b = launch->block;
    const uint64_t n_threads = (uint64_t)b.x * b.y * b.z;
    const char *wrong = NULL;
    if (g.x == 0 || g.y == 0 || g.z == 0) {
        wrong = "the grid is empty";
    } else if (g.x > 2147483647u || g.y > 65535 || g.z > 65535) {
        wrong = "the grid is over 2147483647 x 65535 x 65535 blocks";
    } else if (n_threads == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || n_threads > MAX_THREADS) {
        wrong = "a block has 1 to 1024 threads, at most 64 along z";
    } else if (launch->shared_bytes > MAX_SHARED_BYTES) {
        wrong = "dynamic shared memory is at most 232448 bytes a block";
    }
    if (wrong == NULL) {
        return;
    }
    print_launch(launch);
    fprintf(stderr, " cannot be launched: grid (%u, %u, %u), block (%u, %u, %u), %zu bytes: %s\n",
            g.x, g.y, g.z, b.x, b.y, b.z, launch->shared_bytes, wrong);
    abort();
}

void fibre_run(const struct fibre_launch *launch, void (*thread)(const void *closure),
               const void *closure)
{
    struct emulator *e = get_emulator();
    if (e->launch != NULL) {
        fibre_die("launches kernel %s, which a kernel cannot", launch->name);
    }
    fibre_check_launch(launch);
    gridDim = launch->grid;
    blockDim = launch->block;
    blockIdx = threadIdx = {0, 0, 0};
    e->launch = launch;
    choose_order(e);
    e->thread = thread;
    e->closure = closure;
    e->n_threads = (int)(blockDim.x * blockDim.y * blockDim.z);
    /* As many bytes as asked for, so that a sanitizer sees a step beyond them. */
    void *shared = NULL;
    if (posix_memalign(&shared, 128, launch->shared_bytes) != 0) {
        fibre_die("no memory for %zu bytes of shared memory", launch->shared_bytes);
    }
    e->shared = (unsigned char *)shared;
    for (unsigned i = 0; i < (unsigned)e->n_threads; i++) {
        e->fibres[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y,
                              i / (blockDim.x * blockDim.y)};
    }
    const uint64_t plane = (uint64_t)gridDim.x * gridDim.y;
    const struct permutation order = permute(e, plane * gridDim.z);
    for (uint64_t i = 0; i < plane * gridDim.z; i++) {
        const uint64_t block = permuted(&order, i);
        blockIdx = {(unsigned)(block % gridDim.x), (unsigned)(block / gridDim.x % gridDim.y),
                    (unsigned)(block / plane)};
        run_block(e);
    }
    free(shared);
    e->shared = NULL;
    e->launch = NULL;
}

void *fibre_dynamic_shared(void)
{
    current_fibre("DYNAMIC_SHARED");
    if (emulator->launch->shared_bytes == 0) {
        fibre_die("DYNAMIC_SHARED, but launched with none");
    }
    return emulator->shared;
}

int fibre_lane(void)
{
    return (int)(current_fibre("a warp operation") - emulator->fibres) % WARP_LANES;
}

void fibre_sync_block(struct fibre_place place)
{
    current_fibre(place.what)->place = place;
    leave(FIBRE_BLOCK);
}

void fibre_sync_warp(struct fibre_warp_call *call)
{
    struct fibre *fibre = current_fibre(call->place.what);
    call->lane = fibre_lane();
    const int first = (int)(fibre - emulator->fibres) - call->lane;
    const int left = emulator->n_threads - first;
    if (call->aligned && left < WARP_LANES) {
        fibre_die("%s at %s:%d in a warp of %d threads; it takes 32", call->place.what,
                  call->place.file, call->place.line, left);
    }
    if ((call->mask >> call->lane & 1) == 0) {
        fibre_die("lane %d in %s at %s:%d is not in its mask 0x%08X", call->lane, call->place.what,
                  call->place.file, call->place.line, call->mask);
    }
    fibre->place = call->place;
    fibre->call = call;
    leave(FIBRE_WARP);
    fibre->call = NULL;
}

/* ---- cp.async ---- */

void cp_async16_zfill(void *shared, const void *global, bool valid, const char *file, int line)
{
    struct copies *copies = &current_fibre("cp_async16")->copies;
    if (((uintptr_t)shared | (uintptr_t)global) % COPY_BYTES != 0) {
        fibre_die("cp_async16 at %s:%d from %p to %p: not 16-byte aligned", file, line, global,
                  shared);
    }
    if (copies->n == copies->room) {
        const size_t room = copies->room == 0 ? 16 : 2 * copies->room;
        void *list = realloc(copies->list, room * sizeof *copies->list);
        if (list == NULL) {
            fibre_die("no memory for %zu asynchronous copies", room);
        }
        copies->list = (struct copy *)list;
        copies->room = room;
    }
    copies->list[copies->n++] = {shared, valid ? global : NULL, copies->n_committed};
    memset(shared, 0xFF, COPY_BYTES);
}

void cp_async_commit(void)
{
    current_fibre("cp_async_commit")->copies.n_committed++;
}

void fibre_copies_wait(int n_pending)
{
    struct copies *copies = &current_fibre("cp_async_wait")->copies;
    size_t n = 0;
    while (n < copies->n && copies->list[n].group + (uint64_t)n_pending < copies->n_committed) {
        const struct copy *copy = &copies->list[n++];
        if (copy->global != NULL) {
            memcpy(copy->shared, copy->global, COPY_BYTES);
        } else {
            memset(copy->shared, 0, COPY_BYTES);
        }
    }
    copies->n -= n;
    memmove(copies->list, copies->list + n, copies->n * sizeof *copies->list);
}
