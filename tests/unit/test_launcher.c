/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers: the variables of each, one inside another, what is derived from them, and Slurm's lists of nodes. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "boot/boot.h"
#include "boot/launcher.h"
#include "boot/nodelist.h"
#include "boot/rendezvous.h"
#include "tests/lib/unit.h"

/* Exactly these variables: the tests themselves may run inside mpirun or srun. */
static void set_environment(const char *const *variables)
{
    clearenv();
    for (; *variables; variables++) {
        char name[64];
        size_t length = strcspn(*variables, "=");
        snprintf(name, sizeof(name), "%.*s", (int)length, *variables);
        assert_int_equal(setenv(name, *variables + length + 1, 1), 0);
    }
}

#define ENVIRONMENT(...) set_environment((const char *const[]){__VA_ARGS__, NULL})

static struct launcher expect_found(const char *name, int rank, int nranks, int local_rank)
{
    struct launcher found;
    epx_status status = launcher_read(&found);

    if (status)
        print_error("%s\n", epx_last_error());
    assert_int_equal(status, EPX_OK);
    assert_string_equal(found.name, name);
    assert_string_equal(launcher_name(), name);
    assert_int_equal(found.rank, rank);
    assert_int_equal(found.nranks, nranks);
    assert_int_equal(found.local_rank, local_rank);
    return found;
}

static void expect_failure(epx_status status, const char *const *words)
{
    struct launcher found;

    assert_int_equal(launcher_read(&found), status);
    for (; *words; words++) {
        if (!strstr(epx_last_error(), *words))
            print_error("no \"%s\" in: %s\n", *words, epx_last_error());
        assert_non_null(strstr(epx_last_error(), *words));
    }
}

#define EXPECT_FAILURE(status, ...) expect_failure(status, (const char *const[]){__VA_ARGS__, NULL})

/* ---- One launcher -------------------------------------------------------------------------------------------- */

static void torchrun_is_found(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT("RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4", "MASTER_ADDR=node1",
                "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=abc");
    found = expect_found("torchrun", 5, 8, 1);
    assert_int_equal(found.local_nranks, 4);
    assert_string_equal(found.host, "node1");
    assert_null(found.host_from);
    assert_int_equal(found.port, 29500);
    assert_string_equal(found.job, "abc");
}

static void ranks_set_by_hand_are_found(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234");
    found = expect_found("RANK and WORLD_SIZE", 1, 2, -1);
    assert_string_equal(found.host, "10.0.0.1");
    assert_int_equal(found.port, 1234);
    assert_string_equal(found.job, "");
}

#define OPEN_MPI_RANK "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=0"
#define OPEN_MPI_4                                                                                            \
    OPEN_MPI_RANK, "PMIX_RANK=2", "PMIX_NAMESPACE=2038169601", "OMPI_MCA_orte_precondition_transports=d3-54", \
        "OMPI_MCA_orte_hnp_uri=2038169600.0;tcp://10.0.0.2,10.1.0.2:34269;tcp6://[fd00::2]:47837"

static void open_mpi_on_one_machine_needs_no_variable(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=4");
    found = expect_found("Open MPI", 2, 4, 0);
    assert_string_equal(found.host, "127.0.0.1");
    assert_string_equal(found.host_from, "all ranks are on this machine");
    assert_true(found.port >= 16384 && found.port + RENDEZVOUS_MORE_PORTS < 32768);
}

static void open_mpi_4_on_several_machines_knows_mpiruns_addresses(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=2");
    found = expect_found("Open MPI", 2, 4, 0);
    assert_string_equal(found.host, "10.0.0.2,10.1.0.2,fd00::2");
    assert_non_null(strstr(found.host_from, "OMPI_MCA_orte_hnp_uri"));
}

static void open_mpi_5_on_several_machines_knows_mpiruns_machine(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT(OPEN_MPI_RANK, "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=prterun-gpu-node-07-4242@1");
    found = expect_found("Open MPI", 2, 4, 0);
    assert_string_equal(found.host, "gpu-node-07");
    assert_non_null(strstr(found.host_from, "PMIX_NAMESPACE"));
}

static void open_mpi_in_a_slurm_job_tries_its_first_node_too(void **state)
{
    (void)state;
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=2", "SLURM_JOB_NODELIST=n[03-04]", "SLURM_PROCID=0",
                "SLURM_NTASKS=1", "SLURM_STEP_ID=0");
    assert_string_equal(expect_found("Open MPI", 2, 4, 0).host, "n03,10.0.0.2,10.1.0.2,fd00::2");
}

static void open_mpi_says_how_to_pass_an_address(void **state)
{
    (void)state;
    ENVIRONMENT(OPEN_MPI_RANK, "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=123");
    EXPECT_FAILURE(EPX_ERR_USAGE, "MASTER_ADDR is not set", "Open MPI",
                   "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT");
}

static void master_addr_and_port_come_first(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=4", "MASTER_ADDR=there", "MASTER_PORT=7777");
    found = expect_found("Open MPI", 2, 4, 0);
    assert_string_equal(found.host, "there");
    assert_null(found.host_from);
    assert_int_equal(found.port, 7777);
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=4", "EPX_MASTER_PORT=8888", "MASTER_PORT=7777");
    assert_int_equal(expect_found("Open MPI", 2, 4, 0).port, 8888);
}

#define SLURM_RANK "SLURM_PROCID=3", "SLURM_NTASKS=4", "SLURM_LOCALID=1", "SLURM_JOB_ID=42", "SLURM_STEP_ID=7"

static void slurm_on_one_node_uses_the_loopback_address(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT(SLURM_RANK, "SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NODELIST=n7");
    found = expect_found("Slurm", 3, 4, 1);
    assert_string_equal(found.host, "127.0.0.1");
    assert_string_equal(found.job, "42,7");
}

static void slurm_on_several_nodes_takes_the_first(void **state)
{
    (void)state;
    ENVIRONMENT(SLURM_RANK, "SLURM_STEP_NUM_NODES=3", "SLURM_STEP_NODELIST=node[09-10,12]",
                "SLURM_JOB_NODELIST=node[01-20]", "SLURM_LAUNCH_NODE_IPADDR=10.0.0.9");
    assert_string_equal(expect_found("Slurm", 3, 4, 1).host, "node09");
    ENVIRONMENT(SLURM_RANK, "SLURM_NNODES=2", "SLURM_NODELIST=a,b");
    assert_string_equal(expect_found("Slurm", 3, 4, 1).host, "a");
    ENVIRONMENT(SLURM_RANK, "SLURM_LAUNCH_NODE_IPADDR=10.0.0.9");
    assert_string_equal(expect_found("Slurm", 3, 4, 1).host, "10.0.0.9");
}

static void slurm_counts_the_tasks_of_the_step(void **state)
{
    (void)state;
    ENVIRONMENT("SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_STEP_NUM_TASKS=1", "SLURM_STEP_ID=4294967290");
    expect_found("Slurm", 0, 1, -1);
}

static void a_batch_script_is_no_task(void **state)
{
    (void)state;
    ENVIRONMENT("SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0", "SLURM_JOB_ID=42");
    assert_null(launcher_name());
    EXPECT_FAILURE(EPX_ERR_USAGE, "srun");
}

/* MPICH's daemon makes a socket pair for each rank: so does this process for itself. */
static void pmi_on_one_machine_takes_the_daemons_process_id(void **state)
{
    char fd[32], expected[32];
    struct launcher found;
    int pair[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    snprintf(fd, sizeof(fd), "PMI_FD=%d", pair[0]);
    snprintf(expected, sizeof(expected), "hydra %d", (int)getpid());
    ENVIRONMENT("PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2", fd);
    found = expect_found("PMI (MPICH, Intel MPI)", 1, 2, 1);
    assert_string_equal(found.host, "127.0.0.1");
    assert_string_equal(found.job, expected);
    assert_true(found.port >= 16384);
    close(pair[0]);
    close(pair[1]);
}

static void pmi_says_what_to_pass(void **state)
{
    (void)state;
    ENVIRONMENT("PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=1");
    EXPECT_FAILURE(EPX_ERR_USAGE, "MASTER_ADDR is not set", "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT");
    ENVIRONMENT("PMI_RANK=1", "PMI_SIZE=2", "MASTER_ADDR=a");
    EXPECT_FAILURE(EPX_ERR_USAGE, "MASTER_PORT is not set", "-genv MASTER_PORT PORT");
}

static void pmix_needs_the_number_of_ranks(void **state)
{
    (void)state;
    ENVIRONMENT("PMIX_RANK=1", "PMIX_NAMESPACE=job7");
    EXPECT_FAILURE(EPX_ERR_USAGE, "PMIX_RANK is 1", "pass WORLD_SIZE");
    ENVIRONMENT("PMIX_RANK=1", "PMIX_NAMESPACE=job7", "WORLD_SIZE=2", "MASTER_ADDR=a");
    assert_true(expect_found("PMIx", 1, 2, -1).port >= 16384);
}

static void no_launcher_is_explained(void **state)
{
    (void)state;
    ENVIRONMENT("PATH=/bin");
    assert_null(launcher_name());
    EXPECT_FAILURE(EPX_ERR_USAGE, "no launcher", "epx run", "torchrun", "mpirun", "srun", "bootstrap");
    ENVIRONMENT("OMPI_COMM_WORLD_RANK=1");
    EXPECT_FAILURE(EPX_ERR_USAGE, "no launcher");
}

static void invalid_numbers_are_explained(void **state)
{
    (void)state;
    ENVIRONMENT("OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4");
    EXPECT_FAILURE(EPX_ERR_ARGUMENT, "OMPI_COMM_WORLD_RANK is \"4\", expected an integer from 0 to 3");
    ENVIRONMENT("SLURM_PROCID=0", "SLURM_NTASKS=x", "SLURM_STEP_ID=0");
    EXPECT_FAILURE(EPX_ERR_ARGUMENT, "SLURM_NTASKS is \"x\"");
}

/* ---- One inside another -------------------------------------------------------------------------------------- */

static void torchrun_inside_srun_or_mpirun_counts(void **state)
{
    (void)state;
    ENVIRONMENT("RANK=9", "WORLD_SIZE=16", "LOCAL_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=x",
                SLURM_RANK, OPEN_MPI_4);
    expect_found("torchrun", 9, 16, 1);
    ENVIRONMENT("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=1", "TORCHELASTIC_RUN_ID=x",
                SLURM_RANK);
    expect_found("torchrun", 1, 2, 1);
}

static void several_ranks_per_task_count(void **state)
{
    (void)state;
    ENVIRONMENT("RANK=9", "WORLD_SIZE=16", "MASTER_ADDR=a", "MASTER_PORT=1", SLURM_RANK);
    expect_found("RANK and WORLD_SIZE", 9, 16, -1);
}

static void equal_ranks_use_what_the_launcher_knows(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT("RANK=2", "WORLD_SIZE=4", OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=4");
    found = expect_found("RANK and WORLD_SIZE", 2, 4, -1);
    assert_string_equal(found.host, "127.0.0.1");
    assert_true(found.port >= 16384);
}

static void contradictions_name_both(void **state)
{
    (void)state;
    ENVIRONMENT("RANK=0", "WORLD_SIZE=1", OPEN_MPI_4);
    EXPECT_FAILURE(EPX_ERR_MISMATCH, "RANK is 0 and WORLD_SIZE is 1", "Open MPI", "OMPI_COMM_WORLD_RANK to 2",
                   "OMPI_COMM_WORLD_SIZE to 4", "unset RANK and WORLD_SIZE");
    ENVIRONMENT("RANK=1", "WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=1", SLURM_RANK);
    EXPECT_FAILURE(EPX_ERR_MISMATCH, "RANK is 1", "SLURM_PROCID to 3", "SLURM_NTASKS to 4");
    ENVIRONMENT("RANK=0", "WORLD_SIZE=1", "PMI_RANK=1", "PMI_SIZE=2");
    EXPECT_FAILURE(EPX_ERR_MISMATCH, "RANK is 0", "PMI_RANK to 1");
}

static void srun_with_pmi_uses_slurms_nodes(void **state)
{
    struct launcher found;

    (void)state;
    ENVIRONMENT("PMI_RANK=3", "PMI_SIZE=4", "PMI_JOBID=42.7", SLURM_RANK, "SLURM_NNODES=2", "SLURM_NODELIST=n[1-2]");
    found = expect_found("PMI (MPICH, Intel MPI)", 3, 4, -1);
    assert_string_equal(found.host, "n1");
    assert_string_equal(found.job, "42,7");
}

static void epx_run_hides_outer_launchers(void **state)
{
    (void)state;
    ENVIRONMENT("RANK=0", "WORLD_SIZE=1", OPEN_MPI_4, SLURM_RANK, "PMI_RANK=1", "PMI_SIZE=4", "TORCHELASTIC_RUN_ID=x");
    launcher_clear_environment();
    expect_found("RANK and WORLD_SIZE", 0, 1, -1);
    assert_null(getenv("OMPI_COMM_WORLD_RANK"));
}

/* ---- Jobs and addresses -------------------------------------------------------------------------------------- */

static int port_of_job(const char *transports)
{
    char variable[80];

    snprintf(variable, sizeof(variable), "OMPI_MCA_orte_precondition_transports=%s", transports);
    ENVIRONMENT(OPEN_MPI_RANK, "OMPI_COMM_WORLD_LOCAL_SIZE=4", "PMIX_NAMESPACE=1", variable);
    return expect_found("Open MPI", 2, 4, 0).port;
}

static void jobs_get_ports_of_their_own(void **state)
{
    int ports[100], equal = 0;

    (void)state;
    for (int i = 0; i < 100; i++) {
        char text[16];
        snprintf(text, sizeof(text), "%d", i);
        ports[i] = port_of_job(text);
        assert_int_equal(ports[i], port_of_job(text));
        for (int j = 0; j < i; j++)
            equal += ports[i] == ports[j];
    }
    assert_true(equal < 10);
}

static void a_derived_host_counts_only_for_its_own_rendezvous(void **state)
{
    struct launcher found;
    char host[LAUNCHER_HOST_BYTES];

    (void)state;
    ENVIRONMENT(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE=4");
    launcher_host(host);
    assert_string_equal(host, "");
    found = expect_found("Open MPI", 2, 4, 0);
    launcher_keep_host(&found);
    launcher_host(host);
    assert_string_equal(host, "127.0.0.1");
    ENVIRONMENT("MASTER_ADDR=there");
    launcher_host(host);
    assert_string_equal(host, "there");
    memset(&found, 0, sizeof(found));
    launcher_keep_host(&found);
}

/* 192.0.2.0/24 is reserved for documentation: no machine has such an address. */
static void rank_0_elsewhere_is_told_at_once(void **state)
{
    struct boot *boot;

    (void)state;
    ENVIRONMENT("SLURM_PROCID=0", "SLURM_NTASKS=2", "SLURM_JOB_ID=42", "SLURM_STEP_ID=7", "SLURM_NNODES=2",
                "SLURM_NODELIST=192.0.2.1,192.0.2.2");
    assert_int_equal(boot_open(NULL, 60000, &boot), EPX_ERR_USAGE);
    assert_non_null(strstr(epx_last_error(), "will connect to 192.0.2.1 (Slurm's list of nodes)"));
    assert_non_null(strstr(epx_last_error(), "MASTER_ADDR=HOST MASTER_PORT=PORT srun"));
}

static void a_missing_rank_0_hints_at_master_addr(void **state)
{
    struct boot *boot;

    (void)state;
    ENVIRONMENT("SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_JOB_ID=42", "SLURM_STEP_ID=7", "SLURM_NNODES=1");
    assert_int_equal(boot_open(NULL, 200, &boot), EPX_ERR_TIMEOUT);
    assert_non_null(strstr(epx_last_error(), "to set another address: MASTER_ADDR=HOST MASTER_PORT=PORT srun"));
}

static void several_addresses_are_resolved(void **state)
{
    struct endpoint found[8];
    char text[ENDPOINT_TEXT];
    int count;

    (void)state;
    assert_int_equal(resolve_host("10.0.0.2,10.1.0.2,fd00::2", deadline_in(1000), found, 8, &count), EPX_OK);
    assert_int_equal(count, 3);
    assert_string_equal(endpoint_text(&found[1], text), "10.1.0.2:0");
    assert_string_equal(endpoint_text(&found[2], text), "[fd00::2]:0");
    assert_int_equal(resolve_host("no-such-host.invalid,10.1.0.2", deadline_in(5000), found, 8, &count), EPX_OK);
    assert_int_equal(count, 1);
    assert_int_equal(resolve_host("10.0.0.2,10.1.0.2", deadline_in(1000), found, 1, &count), EPX_OK);
    assert_int_equal(count, 1);
}

/* ---- Slurm's lists of nodes ------------------------------------------------------------------------------------ */

static void expect_nodes(const char *list, const char *const *nodes)
{
    char node[64];
    long count = 0;

    while (nodes[count])
        count++;
    for (long i = 0; i < count; i++) {
        if (nodelist_host(list, i, node, sizeof(node)) != count || strcmp(node, nodes[i]))
            print_error("%s: host %ld is \"%s\", expected \"%s\"\n", list, i, node, nodes[i]);
        assert_int_equal(nodelist_host(list, i, node, sizeof(node)), count);
        assert_string_equal(node, nodes[i]);
    }
    assert_int_equal(nodelist_host(list, count, node, sizeof(node)), count);
    assert_string_equal(node, "");
}

#define EXPECT_NODES(list, ...) expect_nodes(list, (const char *const[]){__VA_ARGS__, NULL})

static void lists_of_nodes_are_expanded(void **state)
{
    (void)state;
    EXPECT_NODES("node1", "node1");
    EXPECT_NODES("a,b-2,c.example.org", "a", "b-2", "c.example.org");
    EXPECT_NODES("node[01-04,07]", "node01", "node02", "node03", "node04", "node07");
    EXPECT_NODES("n[9-11]", "n9", "n10", "n11");
    EXPECT_NODES("n[098-101]", "n098", "n099", "n100", "n101");
    EXPECT_NODES("login,gpu[3,5]-ib,x[0]", "login", "gpu3-ib", "gpu5-ib", "x0");
    EXPECT_NODES("r[1-2]n[0-1]", "r1n0", "r1n1", "r2n0", "r2n1");
    EXPECT_NODES("[1-2]", "1", "2");
}

static void malformed_lists_are_refused(void **state)
{
    static const char *const lists[] = {"",    ",",       "a,",     "a,,b",     "n[",     "n[]",
                                        "n[1", "n[1-]",   "n[-1]",  "n[2-1]",   "n[1,]",  "n[a]",
                                        "n]",  "n[1-2]]", "n[1;2]", "n[1-2-3]", "n[[1]]", "n[0000000000-1]"};
    char node[64];

    (void)state;
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        if (nodelist_host(lists[i], 0, node, sizeof(node)) != -1)
            print_error("accepted: \"%s\"\n", lists[i]);
        assert_int_equal(nodelist_host(lists[i], 0, node, sizeof(node)), -1);
    }
    assert_int_equal(nodelist_host("long-name[1-2]", 0, node, 8), -1);
    assert_int_equal(nodelist_host("a[0-99999999]b[0-99999999]", 0, node, sizeof(node)), -1);
}

UNIT_TESTS(torchrun_is_found, ranks_set_by_hand_are_found, open_mpi_on_one_machine_needs_no_variable,
           open_mpi_4_on_several_machines_knows_mpiruns_addresses, open_mpi_5_on_several_machines_knows_mpiruns_machine,
           open_mpi_in_a_slurm_job_tries_its_first_node_too, open_mpi_says_how_to_pass_an_address,
           master_addr_and_port_come_first, slurm_on_one_node_uses_the_loopback_address,
           slurm_on_several_nodes_takes_the_first, slurm_counts_the_tasks_of_the_step, a_batch_script_is_no_task,
           pmi_on_one_machine_takes_the_daemons_process_id, pmi_says_what_to_pass, pmix_needs_the_number_of_ranks,
           no_launcher_is_explained, invalid_numbers_are_explained, torchrun_inside_srun_or_mpirun_counts,
           several_ranks_per_task_count, equal_ranks_use_what_the_launcher_knows, contradictions_name_both,
           srun_with_pmi_uses_slurms_nodes, epx_run_hides_outer_launchers, jobs_get_ports_of_their_own,
           a_derived_host_counts_only_for_its_own_rendezvous, rank_0_elsewhere_is_told_at_once,
           a_missing_rank_0_hints_at_master_addr, several_addresses_are_resolved, lists_of_nodes_are_expanded,
           malformed_lists_are_refused)
