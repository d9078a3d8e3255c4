/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend for Triton in C, built by native.py: each row of a request's only input, or its first ROW_NUMBERS numbers,
 * comes back as OUTPUT0. So what is measured is Triton itself, without Python.
 *
 * The declarations are the part of Triton's C interface (tritonbackend.h, tritonserver.h) that is used here, in our own
 * words. The server's own functions are found when it loads this library.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef ROW_NUMBERS
#define ROW_NUMBERS 0 /* the whole row */
#endif

typedef struct TRITONSERVER_Error Error; /* NULL: it went well */
typedef struct TRITONBACKEND_ModelInstance Instance;
typedef struct TRITONBACKEND_Request Request;
typedef struct TRITONBACKEND_Response Response;
typedef struct TRITONBACKEND_Input Input;
typedef struct TRITONBACKEND_Output Output;

enum { ERROR_INTERNAL = 1, MEMORY_CPU = 0, MEMORY_GPU = 2, SEND_FINAL = 1, RELEASE_ALL = 1, MOST_DIMS = 8 };

extern Error *TRITONSERVER_ErrorNew(int code, const char *text);
extern void TRITONSERVER_ErrorDelete(Error *);
extern Error *TRITONBACKEND_RequestInputByIndex(Request *, uint32_t index, Input **);
extern Error *TRITONBACKEND_InputProperties(
    Input *, const char **name, int *type, const int64_t **shape, uint32_t *dims, uint64_t *bytes, uint32_t *buffers);
extern Error *TRITONBACKEND_InputBuffer(
    Input *, uint32_t index, const void **buffer, uint64_t *bytes, int *memory, int64_t *memory_id);
extern Error *TRITONBACKEND_ResponseNew(Response **, Request *);
extern Error *TRITONBACKEND_ResponseOutput(
    Response *, Output **, const char *name, int type, const int64_t *shape, uint32_t dims);
extern Error *TRITONBACKEND_OutputBuffer(Output *, void **buffer, uint64_t bytes, int *memory, int64_t *memory_id);
extern Error *TRITONBACKEND_ResponseSend(Response *, uint32_t flags, Error *);
extern Error *TRITONBACKEND_RequestRelease(Request *, uint32_t flags);
extern Error *TRITONBACKEND_ModelInstanceReportStatistics(
    Instance *, Request *, bool success, uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end);
extern Error *TRITONBACKEND_ModelInstanceReportBatchStatistics(
    Instance *, uint64_t rows, uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end);

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* An error that nobody can be told of any more. */
static void drop(Error *error)
{
    if (error != NULL)
        TRITONSERVER_ErrorDelete(error);
}

/* Copy what belongs to the output out of the input's buffers, of which a large HTTP body has several. */
static Error *copy_rows(Input *input, uint32_t buffers, char *to, uint64_t row_bytes, uint64_t kept_bytes)
{
    uint64_t position = 0;
    for (uint32_t index = 0; index < buffers; index++) {
        const void *from;
        uint64_t bytes;
        int memory = MEMORY_CPU;
        int64_t memory_id = 0;
        Error *error = TRITONBACKEND_InputBuffer(input, index, &from, &bytes, &memory, &memory_id);
        if (error != NULL)
            return error;
        if (memory == MEMORY_GPU)
            return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the input is not in host memory");
        for (uint64_t done = 0; done < bytes;) {
            uint64_t row = (position + done) / row_bytes, column = (position + done) % row_bytes;
            uint64_t piece = bytes - done < row_bytes - column ? bytes - done : row_bytes - column;
            if (column < kept_bytes) {
                uint64_t kept = piece < kept_bytes - column ? piece : kept_bytes - column;
                memcpy(to + row * kept_bytes + column, (const char *)from + done, kept);
            }
            done += piece;
        }
        position += bytes;
    }
    return NULL;
}

/* Fill the response to one request; `rows` gets the number of its rows. */
static Error *answer(Request *request, Response *response, uint64_t *rows)
{
    Input *input;
    Output *output;
    int type, memory = MEMORY_CPU;
    int64_t memory_id = 0, kept_shape[MOST_DIMS];
    const int64_t *shape;
    uint32_t dims, buffers;
    uint64_t bytes;
    void *to;
    Error *error = TRITONBACKEND_RequestInputByIndex(request, 0, &input);
    if (error == NULL)
        error = TRITONBACKEND_InputProperties(input, NULL, &type, &shape, &dims, &bytes, &buffers);
    if (error != NULL)
        return error;
    if (dims < 2 || dims > MOST_DIMS || shape[0] < 1 || bytes == 0)
        return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the input needs rows of numbers, in at most 8 dimensions");
    *rows = (uint64_t)shape[0];
    uint64_t row_bytes = bytes / *rows, kept_bytes = row_bytes;
    memcpy(kept_shape, shape, dims * sizeof shape[0]);
    if (ROW_NUMBERS) {
        kept_bytes = ROW_NUMBERS * sizeof(float);
        if (kept_bytes > row_bytes)
            return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the rows of the input are too short");
        kept_shape[1] = ROW_NUMBERS;
        dims = 2;
    }
    error = TRITONBACKEND_ResponseOutput(response, &output, "OUTPUT0", type, kept_shape, dims);
    if (error == NULL)
        error = TRITONBACKEND_OutputBuffer(output, &to, *rows * kept_bytes, &memory, &memory_id);
    if (error == NULL && memory == MEMORY_GPU)
        error = TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the output is not in host memory");
    return error != NULL ? error : copy_rows(input, buffers, to, row_bytes, kept_bytes);
}

/* Called by Triton with each batch. */
__attribute__((visibility("default"))) Error *
TRITONBACKEND_ModelInstanceExecute(Instance *instance, Request **requests, const uint32_t count)
{
    uint64_t start = now_ns(), all_rows = 0;
    for (uint32_t index = 0; index < count; index++) {
        Request *request = requests[index];
        Response *response = NULL;
        uint64_t rows = 1, begun = now_ns();
        Error *error = TRITONBACKEND_ResponseNew(&response, request);
        bool success = false;
        if (error == NULL) {
            error = answer(request, response, &rows);
            success = error == NULL;
            drop(TRITONBACKEND_ResponseSend(response, SEND_FINAL, error));
        }
        drop(error);
        uint64_t end = now_ns();
        drop(TRITONBACKEND_ModelInstanceReportStatistics(instance, request, success, start, begun, end, end));
        drop(TRITONBACKEND_RequestRelease(request, RELEASE_ALL));
        all_rows += rows;
    }
    uint64_t end = now_ns();
    drop(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, all_rows, start, start, end, end));
    return NULL;
}
