/* Runs a fuzzer without libFuzzer: a fixed-seed slice of mutated seeds and noise.
 *
 *   fuzz_<x> --cases N         cases 0..N-1, the same ones each time
 *   fuzz_<x> --case I          that case alone
 *   fuzz_<x> --files FILE...   these inputs
 *   fuzz_<x> --write-seeds DIR a corpus for libFuzzer to start from
 * When a case brings the process down, its number is told. One thread. */
#include "tests/fuzz/fuzz.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>
#include "proto/base/units.h"

enum { MAX_SEEDS = 64, SEED_BYTES = 4096 };

static struct {
    uint8_t bytes[SEED_BYTES];
    size_t n;
} seeds[MAX_SEEDS];
static size_t n_seeds;

static uint8_t input[FUZZ_MAX_BYTES];
static volatile long long current_case = -1;

/* Only what a signal handler may call. */
static void tell_case(void)
{
    char text[64] = "\nfuzz: case ";
    size_t used = strlen(text), first;
    long long number = current_case < 0 ? 0 : current_case;
    char digits[24];
    first = sizeof digits;
    do {
        digits[--first] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    memcpy(text + used, digits + first, sizeof digits - first);
    used += sizeof digits - first;
    text[used++] = '\n';
    if (write(STDERR_FILENO, text, used) < 0) {
        return;
    }
}

static void on_signal(int number)
{
    tell_case();
    signal(number, SIG_DFL);
    raise(number);
}

/* The sanitizers' own end of the process, where they are linked. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void watch_for_death(void)
{
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(tell_case);
        signal(SIGABRT, on_signal);
        return;
    }
    static const int numbers[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        signal(numbers[i], on_signal);
    }
}

/* splitmix64 */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static size_t below(uint64_t *state, size_t limit)
{
    return (size_t)(next_random(state) % limit);
}

static size_t make_noise(uint64_t *state)
{
    size_t n = below(state, below(state, 8) == 0 ? 4096 : 64);
    for (size_t i = 0; i < n; i++) {
        input[i] = (uint8_t)next_random(state);
    }
    return n;
}

/* One change to the first n bytes of the input; returns their new number. */
static size_t mutate(uint64_t *state, size_t n)
{
    static const uint8_t telling[] = {0, 1, 0x7F, 0x80, 0xFF, '"', '\\', '{', '[', '\n', '-', '0'};
    size_t at = n == 0 ? 0 : below(state, n);
    size_t count = 1 + below(state, 8);
    switch (below(state, 8)) {
    case 0: /* a bit */
        input[at] ^= (uint8_t)(1U << below(state, 8));
        return n == 0 ? 1 : n;
    case 1: /* a byte */
        input[at] = (uint8_t)next_random(state);
        return n == 0 ? 1 : n;
    case 2: /* a telling byte */
        input[at] = telling[below(state, sizeof telling)];
        return n == 0 ? 1 : n;
    case 3: /* drop some */
        count = count > n - at ? n - at : count;
        memmove(input + at, input + at + count, n - at - count);
        return n - count;
    case 4: /* cut the end */
        return at;
    case 5: /* insert some */
        memmove(input + at + count, input + at, n - at);
        for (size_t i = 0; i < count; i++) {
            input[at + i] = (uint8_t)next_random(state);
        }
        return n + count;
    case 6: /* say a part twice */
        count = count * 4 > n - at ? n - at : count * 4;
        memmove(input + at + count, input + at, n - at);
        return n + count;
    default: { /* another seed's part over it */
        size_t other = below(state, n_seeds);
        size_t from = below(state, seeds[other].n);
        size_t most = seeds[other].n - from;
        count = most > FUZZ_MAX_BYTES - at ? FUZZ_MAX_BYTES - at : most;
        count = 1 + below(state, count);
        memcpy(input + at, seeds[other].bytes + from, count);
        return at + count > n ? at + count : n;
    }
    }
}

/* Case number -> input: every case starts its own random sequence, so each can be run alone. */
static size_t make_case(uint64_t number)
{
    uint64_t state = number;
    if (n_seeds == 0 || number % 8 == 7) {
        return make_noise(&state);
    }
    size_t seed = number < n_seeds ? (size_t)number : below(&state, n_seeds), n = seeds[seed].n;
    memcpy(input, seeds[seed].bytes, n);
    /* Mostly one change: more of them seldom leave anything that is taken at all. */
    size_t changes = number < n_seeds ? 0 : 1 + below(&state, 1 + below(&state, 6));
    for (size_t i = 0; i < changes && n + 64 < FUZZ_MAX_BYTES / 2; i++) {
        n = mutate(&state, n);
    }
    return n;
}

static void run_case(uint64_t number)
{
    current_case = (long long)number;
    size_t n = make_case(number);
    /* A block of exactly n bytes, so that a sanitizer sees the first one read beyond. */
    uint8_t *bytes = malloc(n == 0 ? 1 : n);
    if (bytes == NULL) {
        abort();
    }
    memcpy(bytes, input, n);
    LLVMFuzzerTestOneInput(bytes, n);
    free(bytes);
}

static int run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    size_t n = fread(input, 1, sizeof input, file);
    fclose(file);
    LLVMFuzzerTestOneInput(input, n);
    return 0;
}

static int write_seeds(const char *folder)
{
    for (size_t i = 0; i < n_seeds; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/seed-%02zu", folder, i);
        FILE *file = fopen(path, "wb");
        if (file == NULL) {
            perror(path);
            return 1;
        }
        size_t written = fwrite(seeds[i].bytes, 1, seeds[i].n, file);
        if (fclose(file) != 0 || written != seeds[i].n) {
            perror(path);
            return 1;
        }
    }
    return 0;
}

static void load_seeds(void)
{
    if (fuzz_seed == NULL) {
        return;
    }
    while (n_seeds < MAX_SEEDS) {
        size_t n = fuzz_seed(n_seeds, seeds[n_seeds].bytes, SEED_BYTES);
        if (n == 0) {
            return;
        }
        seeds[n_seeds++].n = n;
    }
}

int main(int argc, char **argv)
{
    int64_t number = 0;
    load_seeds();
    watch_for_death();
    if (argc == 3 && strcmp(argv[1], "--cases") == 0 &&
        units_parse_int(argv[2], 1, INT64_MAX, &number) == STATUS_OK) {
        for (int64_t i = 0; i < number; i++) {
            run_case((uint64_t)i);
        }
        printf("%lld cases, %zu seeds\n", (long long)number, n_seeds);
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--case") == 0 &&
        units_parse_int(argv[2], 0, INT64_MAX, &number) == STATUS_OK) {
        run_case((uint64_t)number);
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--write-seeds") == 0) {
        return write_seeds(argv[2]);
    }
    if (argc >= 3 && strcmp(argv[1], "--files") == 0) {
        int bad = 0;
        for (int i = 2; i < argc; i++) {
            bad |= run_file(argv[i]);
        }
        return bad;
    }
    fprintf(stderr, "usage: %s --cases N | --case I | --files FILE... | --write-seeds DIR\n",
            argv[0]);
    return 2;
}
