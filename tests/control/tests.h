/* The groups of test_ballastd; each returns how many of its tests failed. */
#ifndef BALLAST_TESTS_CONTROL_TESTS_H
#define BALLAST_TESTS_CONTROL_TESTS_H

int run_failure_tests(void);
int run_hostile_tests(void);

#endif
