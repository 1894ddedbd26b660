/* The least that an all_reduce inside a node has to do, without any system: threads that sum some
 * arrays of f32 and write the sum to all of them.
 *
 *   node_memory THREADS ARRAYS SECONDS BYTES,BYTES,...
 *
 * Prints a list of JSON with the median time of each size in microseconds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* Floats that stay in a core's cache between the sum and the copies. */
enum { BLOCK = 4096, WARM_UP = 3, MOST = 300 };

static int threads, arrays, turns;
static size_t count;
static float **array;
static pthread_barrier_t gate;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void share(long number) {
    size_t end = count * (size_t)(number + 1) / (size_t)threads;
    for (size_t at = count * (size_t)number / (size_t)threads; at < end; at += BLOCK) {
        size_t length = end - at < BLOCK ? end - at : BLOCK;
        float *sum = array[0] + at;
        for (int other = 1; other < arrays; other++)
            for (size_t i = 0; i < length; i++) sum[i] += array[other][at + i];
        for (int other = 1; other < arrays; other++)
            memcpy(array[other] + at, sum, length * sizeof *sum);
    }
}

static void *run(void *number) {
    for (int turn = 0; turn < turns; turn++) {
        pthread_barrier_wait(&gate);
        share((long)number);
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of this many turns. */
static double timed(int number) {
    double times[MOST + WARM_UP];
    pthread_t thread[threads];
    turns = number;
    pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
    for (long i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, run, (void *)i)) exit(1);
    for (int turn = 0; turn < turns; turn++) {
        pthread_barrier_wait(&gate);
        double begin = now();
        pthread_barrier_wait(&gate);
        times[turn] = now() - begin;
    }
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&gate);
    qsort(times, (size_t)turns, sizeof *times, order);
    return times[turns / 2];
}

int main(int words, char **word) {
    if (words != 5) return 2;
    threads = atoi(word[1]), arrays = atoi(word[2]);
    double seconds = atof(word[3]);
    array = calloc((size_t)arrays, sizeof *array);
    const char *mark = "[";
    for (char *size = strtok(word[4], ","); size; size = strtok(NULL, ",")) {
        count = (size_t)atoll(size) / sizeof(float);
        for (int i = 0; i < arrays; i++) {
            size_t bytes = count * sizeof(float);
            array[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (array[i] == MAP_FAILED) return 1;
            memset(array[i], 0, bytes);
        }
        double turn = timed(WARM_UP);
        double most = seconds * 1e6 / (turn > 1 ? turn : 1);
        printf("%s%.2f", mark, timed(most < 5 ? 5 : most > MOST ? MOST : (int)most));
        mark = ", ";
        for (int i = 0; i < arrays; i++) munmap(array[i], count * sizeof(float));
    }
    puts("]");
    return 0;
}
