"""Test settings: eight CPU devices, strict promotion, and a compilation cache that survives between runs."""

import os
import tempfile

import jax
import pytest

CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "latte_eqx_jax_cache"))

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def key():
    return jax.random.key(20251201)
