"""Detection of this machine's processor, memory, graphics cards and their link. Nothing here imports torch.

On Linux everything is read from `/proc` and `/sys`, below a root that tests replace, the limits of control groups (both
versions) on this process included. Other systems are queried through psutil and llvmlite.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tuner.gpu import ROOT, GpuInfo, detect_gpus
from tuner.sysctl import performance_cores

X86_FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
                "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")  # fmt: skip
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """One cache of the processor, as the first core sees it."""

    level: int
    """1, 2, 3."""
    kind: Literal["data", "unified"]
    """Whether it holds data only, or instructions too."""
    size_bytes: int
    """Size of this one cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuInfo:
    """The processor, and the part of it that this process may use."""

    name: str
    """The processor's name."""
    architecture: str
    """`x86_64`, `aarch64`, ..."""
    physical_cores: int
    """Cores of the machine, without counting hyper-threads."""
    logical_cores: int
    """Hardware threads of the machine."""
    usable_cores: int
    """Physical cores that this process may use, by its affinity and control group; the number of threads to start."""
    features: tuple[str, ...]
    """Instruction sets that matter to kernels, in Linux's spelling."""
    caches: tuple[CacheInfo, ...]
    """Data and unified caches, smallest level first; empty if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Main memory, and the part that this process may still use."""

    total_bytes: int
    """The machine's memory, or the control group's limit if that is smaller."""
    available_bytes: int
    """Memory available now without swapping or exceeding the limit."""
    limit_bytes: int | None
    """The control group's limit; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The whole machine."""

    cpu: CpuInfo
    """The processor."""
    memory: MemoryInfo
    """Main memory."""
    gpus: tuple[GpuInfo, ...]
    """Graphics cards, in the driver's order."""


def detect(root: Path = ROOT) -> Machine:
    """Detect this machine, or the one described by `/proc` and `/sys` below `root`."""
    return Machine(cpu=detect_cpu(root), memory=detect_memory(root), gpus=detect_gpus(root))


def detect_cpu(root: Path = ROOT) -> CpuInfo:
    """The processor."""
    if root != ROOT:
        return _linux_cpu(root, None)
    return _this_cpu()


@cache
def _this_cpu() -> CpuInfo:
    if sys.platform == "linux" and (ROOT / "proc/cpuinfo").is_file():
        return _linux_cpu(ROOT, frozenset(os.sched_getaffinity(0)))
    return _other_cpu()


def detect_memory(root: Path = ROOT) -> MemoryInfo:
    """Main memory, within the limit of the control group."""
    fields = _key_values(root / "proc/meminfo")
    if "MemTotal" in fields:
        total, available = _kilobytes(fields["MemTotal"]), _kilobytes(fields.get("MemAvailable", fields["MemTotal"]))
    else:
        import psutil

        machine = psutil.virtual_memory()
        total, available = machine.total, machine.available
    group = memory_limit(root)
    if group is None or group.limit_bytes >= total:
        return MemoryInfo(total_bytes=total, available_bytes=available, limit_bytes=None)
    left = max(0, group.limit_bytes - group.used_bytes)
    return MemoryInfo(
        total_bytes=group.limit_bytes, available_bytes=min(available, left), limit_bytes=group.limit_bytes
    )


def boot_id(root: Path = ROOT) -> str:
    """Id that changes at every boot; empty if the system has none."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        pass
    if root != ROOT:
        return ""
    import psutil

    return f"{psutil.boot_time():.0f}"


def _linux_cpu(root: Path, affinity: frozenset[int] | None) -> CpuInfo:
    processors = _processors(root / "proc/cpuinfo")
    if not processors:
        return _other_cpu()
    first = next(iter(processors.values()))
    cores = {number: _core_of(number, fields, root) for number, fields in processors.items()}
    allowed = {core for number, core in cores.items() if affinity is None or number in affinity}
    usable = len(allowed) or len(set(cores.values()))
    quota = processor_limit(root)
    if quota is not None:
        usable = min(usable, max(1, round(quota)))
    flags = set((first.get("flags") or first.get("Features") or "").split())
    arm = "Features" in first
    name = first.get("model name") or first.get("Processor") or first.get("cpu model") or platform.machine()
    return CpuInfo(
        name=" ".join(name.split()),
        architecture=("aarch64" if arm else "x86_64" if flags else platform.machine()),
        physical_cores=len(set(cores.values())),
        logical_cores=len(processors),
        usable_cores=usable,
        features=tuple(feature for feature in (*X86_FEATURES, *ARM_FEATURES) if feature in flags),
        caches=_linux_caches(root, min(processors)),
    )


def _processors(file: Path) -> dict[int, dict[str, str]]:
    """The fields of every hardware thread in `/proc/cpuinfo`, by its number."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found: dict[int, dict[str, str]] = {}
    for block in re.split(r"\n\s*\n", text):
        fields = _fields(block)
        if fields.get("processor", "").isdigit():
            found[int(fields["processor"])] = fields
    return found


def _core_of(number: int, fields: dict[str, str], root: Path) -> tuple[str, str]:
    """(package, core) of a hardware thread; without that information, each thread is its own core."""
    if "core id" in fields:
        return fields.get("physical id", "0"), fields["core id"]
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    core, package = _line(topology / "core_id"), _line(topology / "physical_package_id")
    return (package or "0", core) if core is not None else ("thread", str(number))


def _linux_caches(root: Path, processor: int) -> tuple[CacheInfo, ...]:
    found = []
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{processor}/cache").glob("index*")):
        kind, size, level = _line(folder / "type"), _line(folder / "size"), _line(folder / "level")
        match = re.fullmatch(r"(\d+)([KMG]?)", size or "")
        if kind not in ("Data", "Unified") or match is None or level is None or not level.isdigit():
            continue
        scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
        found.append(
            CacheInfo(level=int(level), kind="data" if kind == "Data" else "unified", size_bytes=int(match[1]) * scale)
        )
    return tuple(sorted(found, key=lambda entry: entry.level))


def _other_cpu() -> CpuInfo:
    """The processor as reported by psutil and llvmlite, on systems without `/proc`."""
    import llvmlite.binding as llvm
    import psutil

    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    spelling = {"avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "amx-int8": "amx_int8", "neon": "asimd",
                "dotprod": "asimddp", "sse4.2": "sse4_2"}  # fmt: skip
    present = {spelling.get(name, name) for name, on in llvm.get_host_cpu_features().items() if on}
    return CpuInfo(
        name=platform.processor() or platform.machine(),
        architecture=platform.machine(),
        physical_cores=physical,
        logical_cores=logical,
        usable_cores=performance_cores() or physical,
        features=tuple(feature for feature in (*X86_FEATURES, *ARM_FEATURES) if feature in present),
        caches=(),
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _key_values(file: Path) -> dict[str, str]:
    try:
        return _fields(file.read_text(encoding="utf-8"))
    except OSError:
        return {}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The tightest memory limit above this process."""

    limit_bytes: int
    """The limit of the whole group."""
    used_bytes: int
    """Memory in use that can't be reclaimed; cached file pages don't count."""


def memory_limit(root: Path) -> GroupMemory | None:
    """The memory limit that leaves the least room; None if there is none."""
    found = [limit for folder in _folders(root, "memory") if (limit := _memory_of(folder)) is not None]
    return min(found, key=lambda group: group.limit_bytes - group.used_bytes, default=None)


def processor_limit(root: Path) -> float | None:
    """CPU time that the groups allow, in processors; None if there is no limit."""
    found = [quota for folder in _folders(root, "cpu") if (quota := _quota_of(folder)) is not None]
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of all its parents, for version 2 and version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _memory_of(folder: Path) -> GroupMemory | None:
    limit = _number(folder / "memory.max")
    used = _number(folder / "memory.current")
    files = ("active_file", "inactive_file")
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        files = ("total_active_file", "total_inactive_file")
    if limit is None or used is None:
        return None
    statistics = _statistics(folder / "memory.stat")
    kept = used - sum(statistics.get(name, 0) for name in files)
    return GroupMemory(limit_bytes=limit, used_bytes=max(0, kept))


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    allowed, every = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return allowed / every if allowed is not None and allowed > 0 and every else None


def _number(file: Path) -> int | None:
    """The number in a file; None for `max`, a missing file, and anything else."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistics(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
