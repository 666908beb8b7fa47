"""Peak FLOP/s by dtype, memory and memory bandwidth of accelerators, from the vendors' data sheets,
and the compute capability of this machine's GPU.

An unlisted device has no peak, and callers must report MFU as unknown.
"""

import contextlib
import ctypes
import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import jax

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One JAX device. Peaks are dense (no structured sparsity), in FLOP/s; a dtype without an entry
    has no fast path.
    """

    name: str
    peak: dict[str, float]
    memory_bytes: int
    bandwidth: float  # bytes/s


def entry(name: str, memory: float, bandwidth: float, **teraflops: float) -> Hardware:
    """`memory` in bytes, `bandwidth` in GB/s."""
    return Hardware(
        name, {kind: value * 1e12 for kind, value in teraflops.items()}, int(memory), bandwidth * GB
    )


# Substrings of jax.Device.device_kind, most specific first.
TABLE: tuple[tuple[tuple[str, ...], Hardware], ...] = (
    # TPUs. A TPU 7x chip shows as two devices, so its row is half a chip.
    (("TPU v4",), entry("TPU v4", 32 * GIB, 1228, bfloat16=275, int8=275)),
    (("TPU v5 lite", "TPU v5e"), entry("TPU v5e", 16 * GIB, 819, bfloat16=197, int8=394)),
    (("TPU v5p", "TPU v5"), entry("TPU v5p", 95 * GIB, 2765, bfloat16=459, int8=918)),
    (("TPU v6 lite", "TPU v6e"), entry("TPU v6e", 32 * GIB, 1640, bfloat16=918, int8=1836)),
    (
        ("TPU7x", "TPU v7x"),
        entry("TPU 7x, one of two cores", 96 * GIB, 3690, bfloat16=1153.5, float8=2307),
    ),
    # NVIDIA
    (
        ("GB300",),
        entry("GB300", 288 * GB, 8000, bfloat16=2500, float16=2500, float8=5000, float32=80),
    ),
    (
        ("B300",),
        entry("B300", 288 * GB, 8000, bfloat16=2250, float16=2250, float8=4500, float32=75),
    ),
    (
        ("GB200",),
        entry(
            "GB200", 186 * GB, 8000, bfloat16=2500, float16=2500, float8=5000, int8=5000, float32=80
        ),
    ),
    (
        ("B200",),
        entry(
            "B200", 180 * GB, 7700, bfloat16=2250, float16=2250, float8=4500, int8=4500, float32=75
        ),
    ),
    (
        ("GH200",),
        entry(
            "GH200",
            96 * GB,
            4000,
            bfloat16=989.4,
            float16=989.4,
            float8=1978.9,
            int8=1978.9,
            float32=67,
        ),
    ),
    (
        ("H200",),
        entry(
            "H200",
            141 * GB,
            4800,
            bfloat16=989.4,
            float16=989.4,
            float8=1978.9,
            int8=1978.9,
            float32=67,
        ),
    ),
    (
        ("H100 NVL",),
        entry(
            "H100 NVL", 94 * GB, 3938, bfloat16=835, float16=835, float8=1671, int8=1671, float32=60
        ),
    ),
    (
        ("H100 PCIe",),
        entry(
            "H100 PCIe",
            80 * GB,
            2039,
            bfloat16=756,
            float16=756,
            float8=1513,
            int8=1513,
            float32=51,
        ),
    ),
    (
        ("H100 80GB HBM3", "H100 SXM"),
        entry(
            "H100 SXM",
            80 * GB,
            3352,
            bfloat16=989.4,
            float16=989.4,
            float8=1978.9,
            int8=1978.9,
            float32=67,
        ),
    ),
    (
        ("H20",),
        entry("H20", 96 * GB, 4000, bfloat16=148, float16=148, float8=296, int8=296, float32=44),
    ),
    (
        ("A100-SXM4-80GB",),
        entry("A100 80GB SXM", 80 * GB, 2039, bfloat16=312, float16=312, int8=624, float32=19.5),
    ),
    (
        ("A100 80GB PCIe",),
        entry("A100 80GB PCIe", 80 * GB, 1935, bfloat16=312, float16=312, int8=624, float32=19.5),
    ),
    (
        ("A100",),
        entry("A100 40GB", 40 * GB, 1555, bfloat16=312, float16=312, int8=624, float32=19.5),
    ),
    (
        ("L40S",),
        entry("L40S", 48 * GB, 864, bfloat16=362, float16=362, float8=733, int8=733, float32=91.6),
    ),
    (
        ("NVIDIA L4",),
        entry("L4", 24 * GB, 300, bfloat16=121, float16=121, float8=242, int8=242, float32=30.3),
    ),
    (("A10G",), entry("A10G", 24 * GB, 600, bfloat16=70, float16=70, int8=140, float32=31.5)),
    (
        ("NVIDIA A10",),
        entry("A10", 24 * GB, 600, bfloat16=125, float16=125, int8=250, float32=31.2),
    ),
    (("V100",), entry("V100", 32 * GB, 900, float16=125, float32=15.7)),
    (
        ("RTX 4090",),
        entry("RTX 4090", 24 * GB, 1008, bfloat16=165.2, float16=165.2, float8=330.3, float32=82.6),
    ),
    (("RTX 3090",), entry("RTX 3090", 24 * GB, 936, bfloat16=71, float16=71, float32=35.6)),
    # AMD
    (
        ("MI300X",),
        entry(
            "MI300X",
            192 * GB,
            5300,
            bfloat16=1307,
            float16=1307,
            float8=2615,
            int8=2615,
            float32=163,
        ),
    ),
)


def lookup(device_kind: str) -> Hardware | None:
    """The entry of a device by its `device_kind`, or None. Names match at word boundaries: L4 is
    not L40S.
    """
    for names, hardware in TABLE:
        for name in names:
            start = device_kind.lower().find(name.lower())
            end = start + len(name)
            starts_word = start == 0 or (start > 0 and not device_kind[start - 1].isalnum())
            if starts_word and (end == len(device_kind) or not device_kind[end].isalnum()):
                return hardware
    return None


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of a device for a dtype, or None if unknown."""
    hardware = lookup(device_kind)
    return hardware.peak.get(dtype) if hardware else None


CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes(limits: tuple[str, ...] = CGROUP_LIMITS) -> int:
    """The memory of this machine, or the limit of its container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        # OSError: no container. ValueError: a container without a limit ("max").
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total


def available_host_bytes(root: Path = Path("/")) -> int:
    """The memory that this process can still take without swapping: Linux's MemAvailable, or what
    the limits of its cgroups or of its address space (`ulimit -v`) leave if that is less. File
    caches count as free. Elsewhere all memory of the machine. `root`: of the file system.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
        available: float = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return host_memory_bytes()
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mount = root / "sys/fs/cgroup"
            if "memory" in controllers.split(","):
                available = min(available, cgroup_free_bytes(mount / "memory", path, V1))
            elif not controllers:
                available = min(available, cgroup_free_bytes(mount, path, V2))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        address_space, _ = process_bytes(root)
        available = min(available, max(limit - address_space, 0))
    return int(available)


def process_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """The address space of this process, and the memory that it uses; 0 where Linux's /proc is not
    there."""
    try:
        pages = (root / "proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return int(pages[0]) * page_bytes, int(pages[1]) * page_bytes


def cuda_memory(index: int) -> tuple[int, int] | None:
    """(free, total) bytes of an NVIDIA GPU, by its index among those that this process sees, as the
    driver counts them for all processes; None without its library."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
            return None
        # The context that JAX has on the device.
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            return None
    except OSError:
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else (free.value, total.value)


# Files of a cgroup: its limit, what it uses, and the name of the file cache in memory.stat.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def cgroup_free_bytes(mount: Path, path: str, names: tuple[str, str, str]) -> float:
    """Bytes that a cgroup and its parents leave free; infinite without a limit."""
    free = float("inf")
    folder = mount / path.strip("/")
    while folder.is_relative_to(mount):
        # OSError: not mounted here. ValueError: no limit ("max").
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, max(limit - used + int(stat.get(names[2], 0)), 0))
        folder = folder.parent
    return free


def format_bytes(amount: float) -> str:
    """Bytes in a readable unit: 512 B, 7.63 MiB, 25.1 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:,.2f} GiB"


DEFAULT_CAPABILITY = "9.0"  # Hopper, when compiling for a GPU that this machine does not have


@functools.cache
def gpu_capability() -> str:
    """ "9.0" on Hopper, "gfx942" on an AMD card, empty without a GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def target_capability() -> str:
    """The capability of the GPU that a program is compiled for."""
    return gpu_capability() or DEFAULT_CAPABILITY


def is_nvidia(capability: str, minimum: tuple[int, int] = (8, 0)) -> bool:
    """Whether it is an NVIDIA GPU of at least this compute capability (AMD's are named gfx…)."""
    version = capability.split(".")
    return all(map(str.isdigit, version)) and tuple(map(int, version)) >= minimum
