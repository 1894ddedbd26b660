/* Times MPI_Allreduce like `gradwire bench`, for any MPI library.
 *
 *   mpi_allreduce sizes BYTES:WARMUP:ITERATIONS[:barrier],...
 *   mpi_allreduce model FILE WARMUP ITERATIONS blocking|async
 *
 * Float32, sum, in place. Every iteration begins with fresh data and its result is checked, both
 * untimed; above 16 MiB only every tenth result is checked. The time of an iteration is that of the
 * slowest rank. `model` reduces the tensors of FILE (a number of elements per line, in sending
 * order), one by one; a step is all of them.
 *
 * Rank 0 prints a line of JSON for each size, or for the model. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static void fail(const char *what) {
    fprintf(stderr, "mpi_allreduce: rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *take(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes ? bytes : 1)) fail("no memory");
    memset(memory, 0, bytes); /* allocates its pages */
    return memory;
}

/* Small whole numbers: their sums are exact in float32, in any order. */
static float value(size_t i, int of_rank) { return (float)(i % 61 + 1) * (float)(of_rank + 1); }

static void fill(float *data, size_t count) {
    for (size_t i = 0; i < count; i++) data[i] = value(i, rank);
}

static void check(const float *data, size_t count) {
    float factor = (float)ranks * (float)(ranks + 1) / 2;
    for (size_t i = 0; i < count; i++)
        if (data[i] != value(i, 0) * factor) fail("a result is wrong");
}

/* Reduces `times` to the slowest rank's, which rank 0 prints in microseconds. */
static void print(long long bytes, double *times, int iterations) {
    MPI_Allreduce(MPI_IN_PLACE, times, iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank) return;
    printf("{\"bytes\": %lld, \"times_us\": [", bytes);
    for (int i = 0; i < iterations; i++) printf("%s%.2f", i ? ", " : "", times[i] * 1e6);
    printf("]}\n");
    fflush(stdout);
}

static void one_size(long long bytes, int warmup, int iterations, int barrier) {
    size_t count = (size_t)bytes / sizeof(float);
    float *data = take(count * sizeof(float));
    double *times = take((size_t)iterations * sizeof(double));
    for (int i = -warmup; i < iterations; i++) {
        fill(data, count);
        if (barrier) MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double end = MPI_Wtime();
        if (i >= 0) times[i] = end - begin;
        /* The rest is not timed, and must not keep other ranks from noticing the end. */
        if (barrier) MPI_Barrier(MPI_COMM_WORLD);
        if (bytes <= 16 << 20 || i < 0 || i % 10 == 0) check(data, count);
    }
    print(bytes, times, iterations);
    free(times);
    free(data);
}

static void sizes(char *plan) {
    for (char *item = strtok(plan, ","); item; item = strtok(NULL, ",")) {
        long long bytes;
        int warmup, iterations, end = 0;
        if (sscanf(item, "%lld:%d:%d%n", &bytes, &warmup, &iterations, &end) != 3 || bytes < 4 ||
            warmup < 0 || iterations < 1)
            fail("a size must be BYTES:WARMUP:ITERATIONS[:barrier]");
        one_size(bytes, warmup, iterations, strcmp(item + end, ":barrier") == 0);
    }
}

static void model(const char *file, int warmup, int iterations, int async) {
    enum { MOST = 4096 };
    static float *tensors[MOST];
    static size_t counts[MOST];
    static MPI_Request requests[MOST];
    int tensors_count = 0;
    long long bytes = 0;
    FILE *lines = fopen(file, "r");
    if (!lines) fail("the file of the model's tensors can't be read");
    for (size_t count; tensors_count < MOST && fscanf(lines, "%zu", &count) == 1; tensors_count++) {
        counts[tensors_count] = count;
        tensors[tensors_count] = take(count * sizeof(float));
        bytes += (long long)(count * sizeof(float));
    }
    fclose(lines);
    if (!tensors_count || iterations < 1) fail("a model has at least one tensor and one step");
    double *times = take((size_t)iterations * sizeof(double));
    for (int i = -warmup; i < iterations; i++) {
        for (int t = 0; t < tensors_count; t++) fill(tensors[t], counts[t]);
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        for (int t = 0; t < tensors_count; t++) {
            if (async)
                MPI_Iallreduce(MPI_IN_PLACE, tensors[t], (int)counts[t], MPI_FLOAT, MPI_SUM,
                               MPI_COMM_WORLD, &requests[t]);
            else
                MPI_Allreduce(MPI_IN_PLACE, tensors[t], (int)counts[t], MPI_FLOAT, MPI_SUM,
                              MPI_COMM_WORLD);
        }
        if (async) MPI_Waitall(tensors_count, requests, MPI_STATUSES_IGNORE);
        double end = MPI_Wtime();
        if (i >= 0) times[i] = end - begin;
        MPI_Barrier(MPI_COMM_WORLD);
        if (i < 0 || i % 10 == 0)
            for (int t = 0; t < tensors_count; t++) check(tensors[t], counts[t]);
    }
    print(bytes, times, iterations);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc == 3 && !strcmp(argv[1], "sizes")) sizes(argv[2]);
    else if (argc == 6 && !strcmp(argv[1], "model"))
        model(argv[2], atoi(argv[3]), atoi(argv[4]), !strcmp(argv[5], "async"));
    else fail("usage: sizes BYTES:WARMUP:ITERATIONS[:barrier],... | model FILE WARMUP ITERATIONS blocking|async");
    MPI_Finalize();
    return 0;
}
