"""Targets to compile for that need not be here."""

from contextlib import nullcontext

import pytest

from train import hardware


def lowering(platform):
    """Where programs can be lowered for a platform, compiler or not."""
    return hardware.imagined_gpu("a100") if platform == "cuda" else nullcontext()


def target_or_skip(name):
    """The devices of a name; without their compiler, the test that asks is skipped."""
    try:
        return hardware.target(name)
    except hardware.CompilerMissing as missing:
        pytest.skip(str(missing))
