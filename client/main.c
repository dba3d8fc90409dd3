/* ballastctl: ask a run and steer it, from a terminal or a script. Sets the process up; what
 * there is to do is in verbs.c. */
#include <locale.h>
#include <stdio.h>
#include "client/verbs.h"
#include "proto/json.h"

int main(int argc, char **argv)
{
    json_use_heap();
    /* Only the character set: numbers stay in the C locale's form. */
    setlocale(LC_CTYPE, "");
    return verbs_main(argc, argv, stdout, stderr);
}
