"""Accelerators: what they can do, and how to compile for ones that are not here.

The compilers come as Python packages, `pip install 'latte-eqx[aot]'`; no device and no driver is needed. What comes out
is what would run there: it can be weighed and read, but not timed.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies


@dataclass(frozen=True)
class Accelerator:
    """The figures of one device, as its maker states them: rates in units per second, sizes in bytes."""

    kind: str
    """What JAX calls it."""
    peak_flops: float
    """Dense bfloat16 operations."""
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    """What leaves for, or comes from, other devices over the fast interconnect, one way."""


# By the names that topologies begin with. A TPU7x chip counts as two devices.
ACCELERATORS = {
    "v5e": Accelerator("TPU v5 lite", 197e12, 16e9, 819e9, 100e9),
    "v5p": Accelerator("TPU v5", 459e12, 95e9, 2765e9, 300e9),
    "v6e": Accelerator("TPU v6 lite", 918e12, 32e9, 1640e9, 224e9),
    "tpu7x": Accelerator("TPU7x", 1153.5e12, 96e9, 3690e9, 300e9),
    "a100": Accelerator("NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2039e9, 300e9),
    "h100": Accelerator("NVIDIA H100 80GB HBM3", 989e12, 84942979072, 3352e9, 450e9),
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

    def compile(self, function: Any, *arguments: Any) -> jax.stages.Compiled:
        """Compile a jitted function for arguments that say, as `jax.ShapeDtypeStruct`, how they lie on the devices."""
        lowered = function.trace(*arguments).lower(lowering_platforms=(self.platform,))
        return lowered.compile(compiler_options=_gpu_options() if self.platform == "cuda" else None)


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
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **how)
    except jax.errors.JaxRuntimeError as error:
        if "libtpu" in str(error):
            raise CompilerMissing("TPUs") from error
        raise UnknownTopology(name) from error


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
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise CompilerMissing("GPUs") from error


def _gpu_options() -> dict[str, Any]:
    """Without a device nothing can be tuned by trying."""
    try:
        from nvidia import cuda_nvcc  # pyright: ignore
    except ImportError as error:
        raise CompilerMissing("GPUs") from error
    return {"xla_gpu_cuda_data_dir": str(Path(next(iter(cuda_nvcc.__path__)))), "xla_gpu_autotune_level": 0}
