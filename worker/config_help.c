/* Owns: --help, printed from the tables of flags, keys and strategy keys. Main thread. */
#include <stdio.h>
#include <string.h>
#include "worker/config_args.h"
#include "worker/config_words.h"

static void print_wrapped(FILE *out, const char *text, int indent)
{
    int column = indent;

    while (*text) {
        const int n = (int)strcspn(text, " ");
        if (column > indent && column + n + 1 > 98) {
            fprintf(out, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", n, text);
        column += n;
        text += n;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static void print_keys(FILE *out)
{
    char range[CONFIG_RANGE_BYTES];

    for (size_t i = 0; i < config_n_rows(); i++) {
        const struct config_row *row = config_row_at(i);
        if (row->verdict != VERDICT_HONOURED) {
            continue;
        }
        fprintf(out, "  %s\n%6s", row->path, "");
        print_wrapped(out, row->help, 6);
        if (row->strategy_key) {
            fprintf(out, "      the strategy key %s\n", row->strategy_key);
            continue;
        }
        fprintf(out, "      %s%s%s\n", config_range_text(row, range),
                row->standard ? "; default " : "", row->standard ? row->standard : "");
    }
}

static void print_others(FILE *out, enum config_verdict verdict, const char *title)
{
    fprintf(out, "\n%s\n", title);
    for (size_t i = 0; i < config_n_rows(); i++) {
        const struct config_row *row = config_row_at(i);
        if (row->verdict == verdict) {
            fprintf(out, "  %s\n      ", row->path);
            print_wrapped(out, row->help, 6);
        }
    }
}

void config_print_help(FILE *out)
{
    fputs("usage: mpirun -n N ballast-worker --config FILE [FLAG]...\n"
          "       ballast-worker --plan [--world N] --config FILE [FLAG]...\n\nflags\n",
          out);
    for (size_t i = 0; config_flag_at(i); i++) {
        const struct config_flag *flag = config_flag_at(i);
        char name[64];
        snprintf(name, sizeof(name), "--%s %s", flag->name, flag->value ? flag->value : "");
        fprintf(out, "  %-28s ", name);
        print_wrapped(out, flag->help, 31);
    }
    fputs("\npresets\n ", out);
    for (const char *const *name = spec_preset_names(); *name; name++) {
        fprintf(out, " %s", *name);
    }
    fputs("\n\nstrategy keys (in \"ballast\": {\"strategy\": {...}} and for --set)\n", out);
    for (size_t i = 0; i < strategy_n_keys(); i++) {
        const struct strategy_key *key = strategy_key(i);
        fprintf(out, "  %s  (%s)\n      ", key->name, key->values);
        print_wrapped(out, key->help, 6);
    }
    fputs("\nkeys of the file that are honoured\n", out);
    print_keys(out);
    print_others(out, VERDICT_ONLY, "keys with one possible value");
    print_others(out, VERDICT_WITHOUT_EFFECT, "keys that are accepted without effect");
    print_others(out, VERDICT_SWITCHED_OFF, "sections that are accepted while switched off");
    print_others(out, VERDICT_REFUSED, "keys that are refused");
}
