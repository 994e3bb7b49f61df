/* SPDX-License-Identifier: Apache-2.0 */
/* epx_graph_*: arguments are checked here, the device records and replays. */
#include "group/launch.h"
#include "group/registry.h"
#include "group/streams.h"
#include "modes/modes.h"
#include "util/status.h"

epx_status epx_graph_begin(epx_group *group, epx_stream stream)
{
    API_ISSUE;
    epx_status status = group_check(group, "epx_graph_begin");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_graph_begin");
    return status == EPX_OK ? graphs_begin(group, group_stream(group, stream)) : status;
}

epx_status epx_graph_end(epx_group *group, epx_stream stream, epx_graph **graph)
{
    epx_graph *unwanted = NULL;
    API_ISSUE;
    epx_status status = group_check(group, "epx_graph_end");

    if (status == EPX_OK)
        status = stream_check(group, stream, "epx_graph_end");
    if (status != EPX_OK)
        return status;
    if (!graph) { /* the recording ends all the same */
        if (graphs_end(group, group_stream(group, stream), &unwanted) == EPX_OK)
            graphs_destroy(unwanted);
        return fail(EPX_ERR_ARGUMENT, "epx_graph_end: graph: expected a pointer, got NULL");
    }
    *graph = NULL;
    return graphs_end(group, group_stream(group, stream), graph);
}

epx_status epx_graph_launch(epx_graph *graph, epx_stream stream)
{
    API_ISSUE;
    epx_status status = graph_check(graph, "epx_graph_launch");

    if (status == EPX_OK)
        status = stream_check(graph->group, stream, "epx_graph_launch");
    if (status == EPX_OK)
        status = ll_graph_check(graph);
    if (status == EPX_OK)
        status = launch_graph(graph, group_stream(graph->group, stream));
    if (status == EPX_OK)
        ll_graph_launched(graph);
    return status;
}

epx_status epx_graph_destroy(epx_graph *graph)
{
    API_ISSUE;
    epx_status status = graph_check(graph, "epx_graph_destroy");

    if (status == EPX_OK)
        graphs_destroy(graph);
    return status;
}
