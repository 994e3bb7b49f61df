/* SPDX-License-Identifier: Apache-2.0 */
#include "routing.h"

#include "tests/lib/workload.h"

const struct option_choice routing_choices[] = {{"uniform", WORKLOAD_UNIFORM},
                                                {"zipf", WORKLOAD_ZIPF},
                                                {"hot", WORKLOAD_HOT},
                                                {"groups", WORKLOAD_GROUPS},
                                                {NULL, 0}};
