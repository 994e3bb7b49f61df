/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads behind a stream's launches. Agents of one launch wait for each other inside kernels, so all of them run
 * at once: agent 0 on the thread that runs the stream, agents 1.. on threads of their own, started when a launch first
 * asks for so many, asleep between launches.
 */
#include <stdio.h>
#include <stdlib.h>

#include "device/cpu/cpu.h"
#include "util/status.h"

struct member {
    struct team *team;
    struct agent agent; /* its scratch is kept from launch to launch */
    pthread_t thread;   /* not for member 0 */
    pthread_cond_t go;
    int called; /* 0, or the agent it shall run: its own number */
};

struct team {
    pthread_mutex_t lock; /* everything below, and `called` of the members */
    pthread_cond_t done;
    struct member **members; /* pointers: members stay where they are while the table grows */
    int count, room;
    int stop;
    int running; /* agents 1.. of the launch that have not returned */
    cpu_kernel_fn kernel;
    const void *params;
    int agents;
};

static void run_agent(struct member *member, int index, int count, cpu_kernel_fn kernel, const void *params)
{
    struct agent *agent = &member->agent;
    void *scratch = agent->scratch;
    size_t scratch_bytes = agent->scratch_bytes;

    *agent = (struct agent){
        .index = index, .count = count, .env = &cpu_thread_env, .scratch = scratch, .scratch_bytes = scratch_bytes};
    kernel(agent, params);
}

static void *member_main(void *arg)
{
    struct member *member = arg;
    struct team *team = member->team;

    pthread_mutex_lock(&team->lock);
    for (;;) {
        cpu_kernel_fn kernel;
        const void *params;
        int index, count;

        while (!member->called && !team->stop)
            pthread_cond_wait(&member->go, &team->lock);
        if (!member->called)
            break;
        index = member->called;
        member->called = 0;
        kernel = team->kernel;
        params = team->params;
        count = team->agents;
        pthread_mutex_unlock(&team->lock);
        run_agent(member, index, count, kernel, params);
        pthread_mutex_lock(&team->lock);
        if (--team->running == 0)
            pthread_cond_signal(&team->done);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

static void member_free(struct member *member)
{
    agent_scratch_free(&member->agent);
    pthread_cond_destroy(&member->go);
    free(member);
}

static epx_status grow_table(struct team *team)
{
    int room = team->room ? team->room * 2 : 4;
    struct member **members;

    if (team->count < team->room)
        return EPX_OK;
    members = realloc(team->members, (size_t)room * sizeof(*members));
    if (!members)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for %d agents", room);
    team->members = members;
    team->room = room;
    return EPX_OK;
}

/* Called with the lock held, but for the first member. */
static epx_status add_member(struct team *team)
{
    struct member *member;
    epx_status status = grow_table(team);
    char name[24]; /* with CPU_MAX_AGENTS at most 15 characters are used */

    if (status != EPX_OK)
        return status;
    member = calloc(1, sizeof(*member));
    if (!member)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for agent %d", team->count);
    member->team = team;
    pthread_cond_init(&member->go, NULL);
    if (team->count > 0) {
        snprintf(name, sizeof(name), "epx-agent-%d", team->count);
        status = cpu_thread_start(&member->thread, name, member_main, member);
        if (status != EPX_OK) {
            member_free(member);
            return status;
        }
    }
    team->members[team->count++] = member;
    return EPX_OK;
}

epx_status team_create(struct team **result)
{
    struct team *team = calloc(1, sizeof(*team));
    epx_status status;

    *result = NULL;
    if (!team)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for %zu bytes", sizeof(*team));
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->done, NULL);
    status = add_member(team);
    if (status != EPX_OK) {
        team_destroy(team);
        return status;
    }
    *result = team;
    return EPX_OK;
}

void team_destroy(struct team *team)
{
    int i;

    if (!team)
        return;
    pthread_mutex_lock(&team->lock);
    team->stop = 1;
    for (i = 1; i < team->count; i++)
        pthread_cond_signal(&team->members[i]->go);
    pthread_mutex_unlock(&team->lock);
    for (i = 0; i < team->count; i++) {
        if (i > 0)
            pthread_join(team->members[i]->thread, NULL);
        member_free(team->members[i]);
    }
    free(team->members);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

epx_status team_reserve(struct team *team, int agents)
{
    epx_status status = EPX_OK;

    pthread_mutex_lock(&team->lock);
    while (status == EPX_OK && team->count < agents)
        status = add_member(team);
    pthread_mutex_unlock(&team->lock);
    return status;
}

void team_run(struct team *team, cpu_kernel_fn kernel, const void *params, int agents)
{
    struct member *first;
    int i;

    pthread_mutex_lock(&team->lock);
    first = team->members[0];
    team->kernel = kernel;
    team->params = params;
    team->agents = agents;
    team->running = agents - 1;
    for (i = 1; i < agents; i++) {
        team->members[i]->called = i;
        pthread_cond_signal(&team->members[i]->go);
    }
    pthread_mutex_unlock(&team->lock);

    run_agent(first, 0, agents, kernel, params);

    pthread_mutex_lock(&team->lock);
    while (team->running > 0)
        pthread_cond_wait(&team->done, &team->lock);
    pthread_mutex_unlock(&team->lock);
}
