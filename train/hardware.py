"""Accelerators: what they can do, and how to compile for ones that are not here.

The compilers come as Python packages, `pip install 'latte-eqx[aot]'`; no device and no driver is needed. What comes out
is what would run there: it can be weighed and read, but not timed.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh


@dataclass(frozen=True)
class Accelerator:
    """The figures of one device, as its maker states them: rates in units per second, sizes in bytes."""

    kind: str
    """What JAX calls it."""
    peak_flops: float
    """Dense bfloat16 operations."""
    memory: float
    """What a program can have of it, as the compiler counts."""
    memory_bandwidth: float
    link_bandwidth: float
    """What leaves for, or comes from, other devices over the fast interconnect, one way."""


# By the names that topologies begin with. A TPU7x chip counts as two devices.
ACCELERATORS = {
    "v5e": Accelerator("TPU v5 lite", 197e12, 15.75 * 2**30, 819e9, 100e9),
    "v5p": Accelerator("TPU v5", 459e12, 95.73 * 2**30, 2765e9, 300e9),
    "v6e": Accelerator("TPU v6 lite", 918e12, 31.24 * 2**30, 1640e9, 224e9),
    "tpu7x": Accelerator("TPU7x", 1153.5e12, 94.74 * 2**30, 3690e9, 300e9),
    "a100": Accelerator("NVIDIA A100-SXM4-80GB", 312e12, 85.100068864e9, 2039e9, 300e9),
    "h100": Accelerator("NVIDIA H100 80GB HBM3", 989e12, 84.942979072e9, 3352e9, 450e9),
}

# What XLA has to know of a GPU to compile for it.
GPU_TRAITS = {
    "a100": dict(
        capability=(8, 0), cores=108, fpus=64, shared=49152, shared_optin=166912, shared_core=167936, l2=41943040,
        clock=1.41,
    ),
    "h100": dict(
        capability=(9, 0), cores=132, fpus=128, shared=49152, shared_optin=232448, shared_core=233472, l2=52428800,
        clock=1.98,
    ),
}  # fmt: skip


class UnknownTopology(ValueError):
    """A name that stands for no devices."""

    def __init__(self, name: str):
        super().__init__(
            f"A topology must be one of {', '.join(ACCELERATORS)}, a colon, and how many devices: chips along each "
            f"side for a TPU (v5e:4x4, v6e:16x16, v5p:4x4x8, tpu7x:2x2x1), devices or machines times devices for a GPU "
            f"(a100:8, h100:2x8), got {name!r}."
        )


class CompilerMissing(ImportError):
    """The package that compiles for a platform is not installed."""

    def __init__(self, platform: str):
        super().__init__(f"To compile for {platform} there must be a compiler: pip install 'latte-eqx[aot]'.")


@dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    name: str
    platform: Literal["tpu", "cuda"]
    accelerator: Accelerator
    devices: tuple[Any, ...]

    def compile(self, function: Any, *arguments: Any, **options: Any) -> jax.stages.Compiled:
        """Compile a jitted function for arguments that say, as `jax.ShapeDtypeStruct`, how they lie on the devices.

        Further options are the compiler's.
        """
        # Arguments on a mesh bring their devices along.
        is_on_mesh = any(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(arguments))
        kind = self.name.partition(":")[0]
        with imagined_gpu(kind) if self.platform == "cuda" and not is_on_mesh else nullcontext():
            lowered = function.trace(*arguments).lower(lowering_platforms=(self.platform,))
        if self.platform == "cuda":
            # Without a device nothing can be tuned by trying.
            options |= {"xla_gpu_cuda_data_dir": str(_cuda_directory()), "xla_gpu_autotune_level": 0}
        with _no_compilation_cache(), _flags_for_tpus() if self.platform == "tpu" else nullcontext():
            return lowered.compile(compiler_options=options)

    def compile_kernels(self, function: Any, *arguments: Any) -> "tuple[jax.stages.Compiled, list[GpuKernel]]":
        """Compile for a GPU, and return as well what the compilers say of each kernel."""
        # Otherwise LLVM would look up, for minutes, the names of functions of its own that nobody reads.
        os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")
        with tempfile.TemporaryDirectory() as directory:
            compiled = self.compile(function, *arguments, xla_dump_to=directory, xla_dump_emitter_re=".*triton.*")
            paths = sorted(Path(directory).glob("*.ptx"))
            return compiled, [kernel for path in paths for kernel in _assemble(path)]


class GpuKernel(NamedTuple):
    """What one kernel takes of a GPU: registers of a thread, and bytes that it shares with others or has to spill."""

    name: str
    registers: int
    shared_memory: int
    spilled: int


@cache
def target(name: str) -> Target:
    """Return the devices that a name such as `v5e:4x4`, `a100:8` or `h100:2x8` stands for."""
    kind, _, shape = name.partition(":")
    if kind not in ACCELERATORS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise UnknownTopology(name)
    sides = [int(side) for side in shape.split("x")]
    if kind in GPU_TRAITS:
        if len(sides) > 2:
            raise UnknownTopology(name)
        machines, devices = [1, *sides][-2:]
        topology = _gpu_topology(kind, machines, devices)
    else:
        topology = _tpu_topology(name, sides)
    platform = "cuda" if kind in GPU_TRAITS else "tpu"
    return Target(name, platform, ACCELERATORS[kind], tuple(topology.devices))


def _tpu_topology(name: str, sides: list[int]) -> topologies.TopologyDescription:
    # Nothing to ask and nobody to share with: the compiler alone is wanted.
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }.items():
        os.environ.setdefault(variable, value)
    how = {"chips_per_host_bounds": (1, 1, 1)} if set(sides) == {1} else {}
    try:
        with _flags_for_tpus():
            return topologies.get_topology_desc(platform="tpu", topology_name=name, **how)
    except RuntimeError as error:
        if "not installed" in str(error) or "libtpu" in str(error):
            raise CompilerMissing("TPUs") from error
        raise UnknownTopology(name) from error


@contextmanager
def imagined_gpu(kind: str) -> Iterator[None]:
    """Trace and lower for one GPU of a kind in `GPU_TRAITS`: from jax 0.12 on, kernels for no GPU cannot be lowered."""
    device = AbstractDevice(ACCELERATORS[kind].kind, num_cores=GPU_TRAITS[kind]["cores"], platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("gpu",), (AxisType.Auto,), abstract_device=device)):
        yield


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Neither write nor read the cache: what was compiled for devices that are not here cannot be loaded from it."""
    before = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        # Whether there is a cache is asked only once, unless it is forgotten.
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextmanager
def _flags_for_tpus() -> Iterator[None]:
    """Hide flags for other platforms: the TPU compiler ends the process where it finds one that it does not know."""
    flags = os.environ.get("XLA_FLAGS")
    if flags is None:
        yield
        return
    os.environ["XLA_FLAGS"] = " ".join(x for x in flags.split() if not x.startswith(("--xla_cpu", "--xla_gpu")))
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = flags


def _gpu_topology(kind: str, machines: int, devices: int) -> topologies.TopologyDescription:
    accelerator, traits = ACCELERATORS[kind], GPU_TRAITS[kind]
    major, minor = traits["capability"]
    description = f"""
        platform_name: "CUDA"
        device_description_str: "{accelerator.kind}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            core_count: {traits["cores"]}  fpus_per_core: {traits["fpus"]}  clock_rate_ghz: {traits["clock"]}
            threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
            thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
            registers_per_core_limit: 65536  registers_per_block_limit: 65536
            shared_memory_per_block: {traits["shared"]}
            shared_memory_per_block_optin: {traits["shared_optin"]}
            shared_memory_per_core: {traits["shared_core"]}
            l2_cache_size: {traits["l2"]}
            memory_bandwidth: {accelerator.memory_bandwidth:.0f}  device_memory_size: {accelerator.memory:.0f}
        }}
    """
    try:
        return topologies.get_topology_desc(
            kind, platform="cuda", topology=f"1x{machines}x{devices}", target_config=description
        )
    except RuntimeError as error:
        raise CompilerMissing("GPUs") from error


def _cuda_directory() -> Path:
    """Return where the assembler is."""
    try:
        from nvidia import cuda_nvcc  # pyright: ignore
    except ImportError as error:
        raise CompilerMissing("GPUs") from error
    return Path(next(iter(cuda_nvcc.__path__)))


def _assemble(path: Path) -> Iterator[GpuKernel]:
    """Assemble a file once more, asking for a report; what memory Pallas' kernels share, Triton has noted beside it."""
    found = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    # Of a program whose kernels are all written by hand, a file without any is left.
    if found is None:
        return
    (architecture,) = found.groups()
    command = [_cuda_directory() / "bin" / "ptxas", "-v", "-arch", architecture, path, "-o", path.with_suffix(".cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for part in report.split("Compiling entry function ")[1:]:
        name, count = part.split("'")[1], lambda pattern, part=part: sum(map(int, re.findall(pattern, part)))
        notes = "".join(note.read_text() for note in path.parent.glob(f"*.{name}.triton-to-llvm.txt"))
        shared = max(map(int, re.findall(r"ttg\.shared = (\d+)", notes)), default=0)
        yield GpuKernel(
            name,
            count(r"Used (\d+) registers"),
            count(r"(\d+) bytes smem") + shared,
            count(r"(\d+) bytes spill"),
        )
