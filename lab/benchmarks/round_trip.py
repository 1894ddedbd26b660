"""Measures the time of a round trip: `round_trip.py serve ADDRESS PORT` on one node, `… ask …` on
the other.

Connecting takes one round trip. The program prints the median of several, in milliseconds.
"""

import socket
import sys
import time
from statistics import median

TIMES = 21


def main() -> None:
    """Serves or asks, according to the command line."""
    what, address, port = sys.argv[1:]
    place = (address, int(port))
    if what == "serve":
        with socket.create_server(place) as server:
            print("ready", flush=True)
            while True:
                server.accept()[0].close()
    times = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        socket.create_connection(place, 5).close()
        times.append(time.perf_counter() - begin)
    print(median(times) * 1e3)


if __name__ == "__main__":
    main()
