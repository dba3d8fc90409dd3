/* Capturing streams into graphs, and replaying these. Owns captures, graphs and what can be
 * launched. Any thread; all state is under emulate_lock.
 *
 * A node is a piece of work with its arguments by value and the nodes it comes after: what stream
 * order and events said. A launch is one item of its stream; its nodes are done in a random order
 * that respects those edges, and other streams may go on in between. */
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda/emulate/emulate.h"

enum { PURPOSE_GRAPH = 2 };

struct node {
    struct emulate_item *item;
    struct emulate_nodes after;
};

struct CUgraph_st {
    struct CUgraph_st *next; /* of all that live */
    unsigned references;     /* the graph, what was instantiated from it, a capture */
    struct node *nodes;
    size_t n, room;
};

struct CUgraphExec_st {
    struct CUgraph_st *graph;
    unsigned n_launched; /* and not done */
};

struct emulate_capture {
    struct emulate_capture *next;
    uint64_t number; /* 1... */
    cudaStream_t origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    struct CUgraph_st *graph;
    cudaStream_t *joined; /* all streams of the capture */
    size_t n_joined;
};

static struct CUgraph_st *graphs;
static struct emulate_capture *captures;
static uint64_t n_captures;
static struct emulate_random order;

static void *grown(void *array, size_t bytes)
{
    void *more = realloc(array, bytes);
    if (more == NULL) {
        emulate_misuse("no host memory for a capture");
    }
    return more;
}

/* ---- sets of nodes ---- */

void emulate_nodes_clear(struct emulate_nodes *nodes)
{
    free(nodes->at);
    *nodes = (struct emulate_nodes){0};
}

static void nodes_add(struct emulate_nodes *nodes, uint32_t node)
{
    size_t i = 0;
    while (i < nodes->n && nodes->at[i] < node) {
        i++;
    }
    if (i < nodes->n && nodes->at[i] == node) {
        return;
    }
    nodes->at = grown(nodes->at, (nodes->n + 1) * sizeof *nodes->at);
    memmove(nodes->at + i + 1, nodes->at + i, (nodes->n - i) * sizeof *nodes->at);
    nodes->at[i] = node;
    nodes->n++;
}

static void nodes_add_all(struct emulate_nodes *nodes, const struct emulate_nodes *more)
{
    for (size_t i = 0; i < more->n; i++) {
        nodes_add(nodes, more->at[i]);
    }
}

/* ---- capturing ---- */

static void join(struct emulate_capture *capture, cudaStream_t stream)
{
    capture->joined = grown(capture->joined, (capture->n_joined + 1) * sizeof *capture->joined);
    capture->joined[capture->n_joined++] = stream;
    stream->capture = capture;
}

void emulate_capture_work(cudaStream_t stream, const struct emulate_work *work)
{
    if (work->run == NULL) {
        emulate_misuse("%s while the stream is captured", work->name);
    }
    struct CUgraph_st *graph = stream->capture->graph;
    if (graph->n == graph->room) {
        graph->room = graph->room * 2 + 16;
        graph->nodes = grown(graph->nodes, graph->room * sizeof *graph->nodes);
    }
    const uint32_t node = (uint32_t)graph->n++;
    graph->nodes[node] = (struct node){.item = emulate_item_new(work), .after = stream->last};
    stream->last = (struct emulate_nodes){0};
    nodes_add(&stream->last, node);
}

void emulate_capture_record(cudaStream_t stream, cudaEvent_t event)
{
    event->capture = stream->capture->number;
    nodes_add_all(&event->captured, &stream->last);
}

void emulate_capture_wait(cudaStream_t stream, cudaEvent_t event)
{
    if (event->capture == 0) {
        emulate_misuse("a captured stream waits for an event that was recorded outside of the "
                       "capture");
    }
    struct emulate_capture *capture = captures;
    while (capture != NULL && capture->number != event->capture) {
        capture = capture->next;
    }
    if (capture == NULL) {
        emulate_misuse("a stream waits for an event whose last record was in a capture that has "
                       "ended");
    }
    if (stream->capture == NULL) {
        if (stream->head != NULL) {
            emulate_misuse("a stream with work queued on it is drawn into a capture");
        }
        join(capture, stream);
    } else if (stream->capture != capture) {
        emulate_misuse("an event joins two captures");
    }
    nodes_add_all(&stream->last, &event->captured);
}

void emulate_not_capturing(const char *call)
{
    pthread_mutex_lock(&emulate_lock);
    for (const struct emulate_capture *c = captures; c != NULL; c = c->next) {
        const bool is_ours = pthread_equal(c->thread, pthread_self()) != 0;
        if (c->mode == cudaStreamCaptureModeGlobal ||
            (c->mode == cudaStreamCaptureModeThreadLocal && is_ours)) {
            emulate_misuse("%s while a stream is captured", call);
        }
    }
    pthread_mutex_unlock(&emulate_lock);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    const cudaError_t error = emulate_enter("cudaStreamBeginCapture");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamBeginCapture", stream);
    struct emulate_capture *capture = calloc(1, sizeof *capture);
    struct CUgraph_st *graph = calloc(1, sizeof *graph);
    if (capture == NULL || graph == NULL) {
        free(capture);
        free(graph);
        return emulate_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&emulate_lock);
    if (stream->capture != NULL) {
        emulate_misuse("cudaStreamBeginCapture of a stream that is captured already");
    }
    if (n_captures == 0) {
        emulate_random_init(&order, PURPOSE_GRAPH);
    }
    graph->references = 1;
    graph->next = graphs;
    graphs = graph;
    *capture = (struct emulate_capture){.next = captures,
                                        .number = ++n_captures,
                                        .origin = stream,
                                        .mode = mode,
                                        .thread = pthread_self(),
                                        .graph = graph};
    captures = capture;
    join(capture, stream);
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

/* Every node has to come before the end of the origin's stream: what runs on another stream has to
 * be joined by an event. */
static void check_joined(const struct emulate_capture *capture)
{
    const struct CUgraph_st *graph = capture->graph;
    bool *reached = calloc(graph->n + 1, sizeof *reached);
    if (reached == NULL) {
        emulate_misuse("no host memory for a capture");
    }
    for (size_t i = 0; i < capture->origin->last.n; i++) {
        reached[capture->origin->last.at[i]] = true;
    }
    for (size_t i = graph->n; i-- > 0;) { /* a node comes after lower ones only */
        if (!reached[i]) {
            emulate_misuse("cudaStreamEndCapture: %s on another stream was not joined by an event",
                           graph->nodes[i].item->work.name);
        }
        for (size_t j = 0; j < graph->nodes[i].after.n; j++) {
            reached[graph->nodes[i].after.at[j]] = true;
        }
    }
    free(reached);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    const cudaError_t error = emulate_enter("cudaStreamEndCapture");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamEndCapture", stream);
    pthread_mutex_lock(&emulate_lock);
    struct emulate_capture *capture = stream->capture;
    if (capture == NULL || capture->origin != stream) {
        emulate_misuse("cudaStreamEndCapture of a stream whose capture was not begun on it");
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        !pthread_equal(capture->thread, pthread_self())) {
        emulate_misuse("cudaStreamEndCapture on another thread than cudaStreamBeginCapture");
    }
    check_joined(capture);
    for (size_t i = 0; i < capture->n_joined; i++) {
        capture->joined[i]->capture = NULL;
        emulate_nodes_clear(&capture->joined[i]->last);
    }
    struct emulate_capture **link = &captures;
    while (*link != capture) {
        link = &(*link)->next;
    }
    *link = capture->next;
    *graph = capture->graph;
    free(capture->joined);
    free(capture);
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    const cudaError_t error = emulate_enter("cudaStreamIsCapturing");
    if (error != cudaSuccess) {
        return error;
    }
    emulate_check_stream("cudaStreamIsCapturing", stream);
    pthread_mutex_lock(&emulate_lock);
    *status = stream->capture != NULL ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

/* ---- graphs ---- */

static void release_graph(struct CUgraph_st *graph)
{
    if (--graph->references > 0) {
        return;
    }
    struct CUgraph_st **link = &graphs;
    while (*link != graph) {
        link = &(*link)->next;
    }
    *link = graph->next;
    for (size_t i = 0; i < graph->n; i++) {
        emulate_item_free(graph->nodes[i].item);
        emulate_nodes_clear(&graph->nodes[i].after);
    }
    free(graph->nodes);
    free(graph);
}

void emulate_check_no_graph(const char *call, const void *start, size_t bytes)
{
    pthread_mutex_lock(&emulate_lock);
    for (const struct CUgraph_st *graph = graphs; graph != NULL; graph = graph->next) {
        for (size_t i = 0; i < graph->n; i++) {
            emulate_item_check_unused(graph->nodes[i].item, call, start, bytes);
        }
    }
    pthread_mutex_unlock(&emulate_lock);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const cudaError_t error = emulate_enter("cudaGraphDestroy");
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&emulate_lock);
    release_graph(graph);
    pthread_mutex_unlock(&emulate_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    const cudaError_t error = emulate_enter("cudaGraphInstantiate");
    if (error != cudaSuccess) {
        return error;
    }
    if (flags != 0) {
        return emulate_error(cudaErrorInvalidValue);
    }
    struct CUgraphExec_st *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&emulate_lock);
    made->graph = graph;
    graph->references++;
    pthread_mutex_unlock(&emulate_lock);
    *exec = made;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const cudaError_t error = emulate_enter("cudaGraphExecDestroy");
    if (error != cudaSuccess) {
        return error;
    }
    pthread_mutex_lock(&emulate_lock);
    if (exec->n_launched > 0) {
        emulate_misuse("cudaGraphExecDestroy of a graph that was launched and is not done");
    }
    release_graph(exec->graph);
    pthread_mutex_unlock(&emulate_lock);
    free(exec);
    return cudaSuccess;
}

/* ---- launches ---- */

/* The executor's; how far one launch has come. */
struct progress {
    size_t n_done;
    bool done[]; /* per node */
};

struct launch {
    struct CUgraphExec_st *exec;
    struct progress *progress; /* owned */
};

static bool may_go(const struct node *node, const struct progress *progress)
{
    for (size_t i = 0; i < node->after.n; i++) {
        if (!progress->done[node->after.at[i]]) {
            return false;
        }
    }
    return true;
}

/* One node that may go, each with the same chance. */
static size_t pick_node(const struct CUgraph_st *graph, const struct progress *progress)
{
    size_t chosen = 0, n_ready = 0;
    for (size_t i = 0; i < graph->n; i++) {
        if (!progress->done[i] && may_go(&graph->nodes[i], progress) &&
            emulate_random_below(&order, ++n_ready) == 0) {
            chosen = i;
        }
    }
    return chosen;
}

static enum emulate_step step_launch(void *closure)
{
    const struct launch *launch = closure;
    const struct CUgraph_st *graph = launch->exec->graph;
    struct progress *progress = launch->progress;
    if (progress->n_done == graph->n) {
        return EMULATE_DONE;
    }
    const size_t i = pick_node(graph, progress);
    emulate_set_running(graph->nodes[i].item->work.name);
    graph->nodes[i].item->work.run(graph->nodes[i].item->closure);
    progress->done[i] = true;
    progress->n_done++;
    return progress->n_done == graph->n ? EMULATE_DONE : EMULATE_MORE;
}

static void dispose_launch(void *closure)
{
    const struct launch *launch = closure;
    pthread_mutex_lock(&emulate_lock);
    launch->exec->n_launched--;
    pthread_mutex_unlock(&emulate_lock);
    free(launch->progress);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    const cudaError_t error = emulate_enter("cudaGraphLaunch");
    if (error != cudaSuccess) {
        return error;
    }
    struct progress *progress = calloc(1, sizeof *progress + exec->graph->n);
    if (progress == NULL) {
        return emulate_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&emulate_lock);
    exec->n_launched++;
    pthread_mutex_unlock(&emulate_lock);
    const struct launch launch = {exec, progress};
    emulate_submit(stream, &(struct emulate_work){.name = "cudaGraphLaunch",
                                                  .step = step_launch,
                                                  .dispose = dispose_launch,
                                                  .closure = &launch,
                                                  .bytes = sizeof launch});
    return cudaSuccess;
}
