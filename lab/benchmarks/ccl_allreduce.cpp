/* Times oneCCL's allreduce on the processor like `gradwire bench`.
 *
 *   ccl_allreduce sizes BYTES:WARMUP:ITERATIONS[:barrier],...
 *
 * Works like mpi_allreduce.c; MPI only starts the ranks and distributes the address at which oneCCL
 * connects them. */
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "oneapi/ccl.hpp"

static int rank, ranks;

static void fail(const char *what) {
    std::fprintf(stderr, "ccl_allreduce: rank %d: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Small whole numbers: their sums are exact in float32, in any order. */
static float value(size_t i, int of_rank) { return float(i % 61 + 1) * float(of_rank + 1); }

static void one_size(ccl::communicator &comm, long long bytes, int warmup, int iterations, bool barrier) {
    std::vector<float> data(size_t(bytes) / sizeof(float));
    std::vector<double> times(iterations);
    float factor = float(ranks) * float(ranks + 1) / 2;
    for (int i = -warmup; i < iterations; i++) {
        for (size_t k = 0; k < data.size(); k++) data[k] = value(k, rank);
        if (barrier) MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        ccl::allreduce(data.data(), data.data(), data.size(), ccl::reduction::sum, comm).wait();
        double end = MPI_Wtime();
        if (i >= 0) times[i] = end - begin;
        // The rest is not timed, and must not keep other ranks from noticing the end.
        if (barrier) MPI_Barrier(MPI_COMM_WORLD);
        if (bytes <= 16 << 20 || i < 0 || i % 10 == 0)
            for (size_t k = 0; k < data.size(); k++)
                if (data[k] != value(k, 0) * factor) fail("a result is wrong");
    }
    MPI_Allreduce(MPI_IN_PLACE, times.data(), iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank) return;
    std::printf("{\"bytes\": %lld, \"times_us\": [", bytes);
    for (int i = 0; i < iterations; i++) std::printf("%s%.2f", i ? ", " : "", times[i] * 1e6);
    std::printf("]}\n");
    std::fflush(stdout);
}

int main(int argc, char **argv) {
    // oneCCL uses MPI from its own threads, and is silently slow if MPI does not know that.
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (level != MPI_THREAD_MULTIPLE) fail("MPI can't be used from several threads");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3 || std::strcmp(argv[1], "sizes")) fail("usage: sizes BYTES:WARMUP:ITERATIONS[:barrier],...");
    ccl::init();
    ccl::shared_ptr_class<ccl::kvs> store;
    ccl::kvs::address_type address{};
    if (rank == 0) {
        store = ccl::create_main_kvs();
        address = store->get_address();
    }
    MPI_Bcast(address.data(), int(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
    if (rank) store = ccl::create_kvs(address);
    {
        auto comm = ccl::create_communicator(ranks, rank, store);
        std::stringstream plan(argv[2]);
        for (std::string item; std::getline(plan, item, ',');) {
            long long bytes;
            int warmup, iterations, end = 0;
            if (std::sscanf(item.c_str(), "%lld:%d:%d%n", &bytes, &warmup, &iterations, &end) != 3 ||
                bytes < 4 || warmup < 0 || iterations < 1)
                fail("a size must be BYTES:WARMUP:ITERATIONS[:barrier]");
            one_size(comm, bytes, warmup, iterations, item.substr(end) == ":barrier");
        }
    }
    MPI_Finalize();
    return 0;
}
