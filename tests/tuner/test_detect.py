from __future__ import annotations

from pathlib import Path

import pytest

from tuner.detect import boot_id, detect, detect_cpu, detect_memory

FLAGS = "fpu sse4_2 avx f16c fma avx2 avx512f avx512bw avx512vl avx512_vnni made_up"
GIB = 1 << 30


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def thread(number: int, package: int, core: int) -> str:
    return (
        f"processor\t: {number}\nmodel name\t: Some  Processor 9000\nphysical id\t: {package}\n"
        f"core id\t\t: {core}\nflags\t\t: {FLAGS}\n"
    )


def x86(root: Path, threads: list[tuple[int, int]]) -> Path:
    """A machine whose hardware threads are (package, core) pairs."""
    write(root / "proc/cpuinfo", "\n".join(thread(i, *where) for i, where in enumerate(threads)))
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "30M")]
    ):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        write(folder / "level", level + "\n")
        write(folder / "type", kind + "\n")
        write(folder / "size", size + "\n")
    return root


def meminfo(root: Path, total: int, available: int) -> Path:
    write(root / "proc/meminfo", f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n")
    return root


def test_hyper_threads_are_one_core(tmp_path: Path) -> None:
    cpu = detect_cpu(x86(tmp_path, [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]))
    assert (cpu.physical_cores, cpu.logical_cores, cpu.usable_cores) == (3, 6, 3)
    assert cpu.name == "Some Processor 9000"
    assert cpu.architecture == "x86_64"


def test_features_and_caches(tmp_path: Path) -> None:
    cpu = detect_cpu(x86(tmp_path, [(0, 0)]))
    assert set(cpu.features) == set(FLAGS.split()) - {"fpu", "made_up"}
    assert [(cache.level, cache.kind, cache.size_bytes) for cache in cpu.caches] == [
        (1, "data", 48 << 10),
        (2, "unified", 2 << 20),
        (3, "unified", 30 << 20),
    ]


def test_arm_takes_cores_from_the_topology_folder(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "".join(f"processor: {i}\nFeatures: fp asimd asimddp i8mm\n\n" for i in range(4)))
    for i in range(4):
        write(tmp_path / f"sys/devices/system/cpu/cpu{i}/topology/core_id", f"{i // 2}\n")
    cpu = detect_cpu(tmp_path)
    assert (cpu.physical_cores, cpu.logical_cores, cpu.architecture) == (2, 4, "aarch64")
    assert cpu.features == ("asimd", "asimddp", "i8mm")
    assert cpu.caches == ()


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("nonsense", 4)],
)
def test_quota_limits_the_usable_cores(tmp_path: Path, quota: str, usable: int) -> None:
    x86(tmp_path, [(0, core) for core in range(4)])
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", quota + "\n")
    cpu = detect_cpu(tmp_path)
    assert (cpu.usable_cores, cpu.physical_cores) == (usable, 4)


def test_memory_without_a_limit(tmp_path: Path) -> None:
    memory = detect_memory(meminfo(tmp_path, 16 * GIB, 9 * GIB))
    assert (memory.total_bytes, memory.available_bytes, memory.limit_bytes) == (16 * GIB, 9 * GIB, None)


def test_the_tightest_group_above_counts_and_its_cached_files_are_free(tmp_path: Path) -> None:
    meminfo(tmp_path, 16 * GIB, 9 * GIB)
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    group = tmp_path / "sys/fs/cgroup"
    write(group / "outer/inner/memory.max", "max\n")
    write(group / "outer/inner/memory.current", f"{1 * GIB}\n")
    write(group / "outer/memory.max", f"{4 * GIB}\n")
    write(group / "outer/memory.current", f"{3 * GIB}\n")
    write(group / "outer/memory.stat", f"anon {1 * GIB}\nactive_file {GIB // 2}\ninactive_file {GIB}\nshmem 5\n")
    memory = detect_memory(tmp_path)
    assert (memory.total_bytes, memory.limit_bytes) == (4 * GIB, 4 * GIB)
    assert memory.available_bytes == 4 * GIB - (3 * GIB - GIB - GIB // 2)


def test_a_limit_never_frees_more_than_the_machine_has(tmp_path: Path) -> None:
    meminfo(tmp_path, 16 * GIB, 1 * GIB)
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "0\n")
    assert detect_memory(tmp_path).available_bytes == 1 * GIB


def test_group_version_one(tmp_path: Path) -> None:
    meminfo(tmp_path, 16 * GIB, 9 * GIB)
    x86(tmp_path, [(0, core) for core in range(8)])
    write(tmp_path / "proc/self/cgroup", "5:memory:/box\n4:cpu,cpuacct:/box\n")
    box = tmp_path / "sys/fs/cgroup/memory/box"
    write(box / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(box / "memory.usage_in_bytes", f"{GIB}\n")
    write(box / "memory.stat", f"total_inactive_file {GIB // 4}\n")
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "300000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    memory = detect_memory(tmp_path)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, GIB + GIB // 4)
    assert detect_cpu(tmp_path).usable_cores == 3


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    meminfo(tmp_path, 16 * GIB, 9 * GIB)
    write(tmp_path / "proc/self/cgroup", "5:memory:/\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    assert detect_memory(tmp_path).limit_bytes is None


def test_a_card_on_the_bus_is_seen_without_its_driver(tmp_path: Path) -> None:
    meminfo(x86(tmp_path, [(0, 0)]), GIB, GIB)
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    for name, text in {
        "vendor": "0x10de",
        "class": "0x030000",
        "device": "0x2786",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "16",
    }.items():
        write(card / name, text + "\n")
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")  # its sound device
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")
    gpus = detect(tmp_path).gpus
    assert [(gpu.vendor, gpu.driver, gpu.memory_total_bytes) for gpu in gpus] == [("nvidia", None, None)]
    assert gpus[0].pcie is not None
    assert (gpus[0].pcie.generation, gpus[0].pcie.lanes, gpus[0].pcie.gb_s) == (4, 16, 31.5)


def test_an_unknown_link_is_none(tmp_path: Path) -> None:
    meminfo(x86(tmp_path, [(0, 0)]), GIB, GIB)
    card = tmp_path / "sys/bus/pci/devices/0000:00:02.0"
    for name, text in {"vendor": "0x8086", "class": "0x030000", "max_link_speed": "Unknown"}.items():
        write(card / name, text + "\n")
    assert detect(tmp_path).gpus[0].pcie is None


def test_boot_id(tmp_path: Path) -> None:
    assert boot_id(tmp_path) == ""
    write(tmp_path / "proc/sys/kernel/random/boot_id", "abc\n")
    assert boot_id(tmp_path) == "abc"


def test_this_machine() -> None:
    machine = detect()
    assert 1 <= machine.cpu.usable_cores <= machine.cpu.physical_cores <= machine.cpu.logical_cores
    assert 0 < machine.memory.available_bytes <= machine.memory.total_bytes
    assert boot_id()
