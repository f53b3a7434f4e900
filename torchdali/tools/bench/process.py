"""What this process and all its children have used, read from Linux's ``/proc``.

Counting only this process would flatter every loader that works in child processes, and waiting for the
children to end would count their start and their end too. So the whole tree is read while it lives.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

__all__ = ["allowed_cores", "cpu_model", "cpu_seconds", "machine_memory_gib", "memory"]

_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024


def cpu_seconds() -> float:
    """User and system time so far of this process, its living descendants, and the children it waited for."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime + waited.ru_utime + waited.ru_stime
    for pid in _tree()[1:]:
        fields = _stat(pid)
        # utime, stime, cutime, cstime: fields 14 to 17 of proc(5), of which two were split off
        total += sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    return total


def memory() -> dict[str, float]:
    """Host memory of the tree in MiB.

    `rss_peak_mib` adds up every process's own peak, so pages that several share are counted several times;
    `pss_mib` is what the tree holds now, with each shared page counted once.
    """
    peak = sum(_kilobytes(pid, "status", "VmHWM:") for pid in _tree()) / 1024
    proportional = sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in _tree()) / 1024
    return {"rss_peak_mib": round(peak), "pss_mib": round(proportional)}


def allowed_cores() -> int:
    """On how many cores the threads of the tree may run: more than were given means that one broke out."""
    allowed: set[int] = set()
    for pid in _tree():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):  # it ended meanwhile
                allowed |= os.sched_getaffinity(int(task.name))
    return len(allowed)


def machine_memory_gib() -> float:
    """The machine's memory in GiB."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _MIB / 1024, 1)


def cpu_model() -> str:
    """The processor's name, or 'unknown'."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _tree() -> list[int]:
    """This process first, then its living descendants."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [os.getpid()]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the command's name; empty when the process is gone."""
    text = "".join(_lines(Path(f"/proc/{pid}/stat")))
    return text.rpartition(")")[2].split()


def _kilobytes(pid: int, file: str, key: str) -> int:
    for line in _lines(Path(f"/proc/{pid}/{file}")):
        if line.startswith(key):
            return int(line.split()[1])
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # the process ended meanwhile, or the kernel does not have this file
        return []
