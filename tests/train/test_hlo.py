"""What a compiled program moves, read from its text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from train.hlo import Program

KB = 1024
# A loop that reads a row of one array and adds it to a row of another, in place, behind a change of shape.
IN_PLACE = """\
HloModule m

%fused (p0: f32[64,256], p1: f32[64,256], p2: s32[]) -> f32[1,64,256] {
  %p0 = f32[64,256]{1,0} parameter(0)
  %p1 = f32[64,256]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %name = f32[64,256]{1,0} bitcast(%p0)
  %old = f32[1,256]{1,0} dynamic-slice(%name, %p2, %zero), dynamic_slice_sizes={1,256}
  %row = f32[1,256]{1,0} dynamic-slice(%p1, %p2, %zero), dynamic_slice_sizes={1,256}
  %sum = f32[1,256]{1,0} add(%old, %row)
  %new = f32[64,256]{1,0} dynamic-update-slice(%name, %sum, %p2, %zero)
  ROOT %out = f32[1,64,256]{2,1,0} bitcast(%new)
}

ENTRY %main (a: f32[64,256], b: f32[64,256], i: s32[]) -> f32[1,64,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %b = f32[64,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[1,64,256]{2,1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""


def test_rows_that_are_read_and_updated_in_place_count_alone():
    """Two rows are read and one is written; the index has 4 bytes."""
    assert Program(IN_PLACE).memory_traffic() == 3 * KB + 4


def test_what_is_read_whole_as_well_counts_whole():
    text = IN_PLACE.replace("add(%old, %row)", "add(%old, %row)\n  %all = f32[64,256]{1,0} negate(%p1)")
    assert Program(text).memory_traffic() == 2 * KB + 64 * KB + 4


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("steps", [8, 64])
def test_a_scan_moves_what_its_steps_move(steps):
    """Each step reads a row and writes one; nothing that it keeps is counted again with every step."""

    def run(x):
        return lax.scan(lambda carry, row: (carry, jnp.tanh(row)), 0, x)[1]

    text = jax.jit(run).lower(jnp.zeros((steps, 256 * KB))).compile().as_text()
    assert text is not None
    row = 4 * 256 * KB
    assert 2 * steps * row <= Program(text).memory_traffic() <= 4 * steps * row
