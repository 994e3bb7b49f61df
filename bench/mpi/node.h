/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_MPI_NODE_H
#define EPX_MPI_NODE_H

/*
 * epx-mpi-baseline --node NAME COMMAND...: in the place of ssh, when mpirun starts its daemons on several nodes. Runs
 * the command on this machine under the name of the node, so that Open MPI takes the nodes for different machines:
 * shared memory inside each of them, and TCP between them. An exit code; returns only when it fails.
 */
int node_run(const char *name, char **command, int words);

#endif
