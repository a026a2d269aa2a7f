"""Test settings: eight CPU devices, strict promotion, and a compilation cache that survives between runs.

The tests compile much and run little, so most of XLA's optimizations are off; `LATTE_EQX_OPTIMIZE=1` turns them on.
"""

import os
import tempfile

# In the environment, so that processes which tests start have them, too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "latte_eqx_jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if not os.environ.get("LATTE_EQX_OPTIMIZE"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import pytest

if not os.environ.get("LATTE_EQX_OPTIMIZE") and jax.__version_info__ < (0, 11):
    # By far the slowest part of the compiler where it can be left out; later versions do not know the flag.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    return jax.random.key(20251201)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Thousands of compiled programs in one process exhaust the memory maps that Linux allows it."""
    yield
    jax.clear_caches()


@pytest.fixture
def optimized():
    """Compile as users do, for bounds of a few roundings that hold only then."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
