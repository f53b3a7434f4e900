"""All regimes, in the order in which they are measured."""

from benchmarks.regimes import loader, proxy, startup, training

REGIMES = {**loader.REGIMES, "training": training.REGIME, "startup": startup.REGIME, "proxy": proxy.REGIME}
DEFAULT = ("decode", "loader", "training", "startup")
