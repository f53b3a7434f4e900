"""All benchmarks, in the order in which they are measured."""

from benchmarks.suite import loader, proxy, startup, training

BENCHMARKS = {
    **loader.BENCHMARKS,
    "training": training.BENCHMARK,
    "startup": startup.BENCHMARK,
    "proxy": proxy.BENCHMARK,
}
DEFAULT = ("decode", "loader", "training", "startup")
