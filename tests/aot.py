"""Targets to compile for that need not be here."""

import pytest

from train import hardware


def target_or_skip(name):
    """The devices of a name; without their compiler, the test that asks is skipped."""
    try:
        return hardware.target(name)
    except hardware.CompilerMissing as missing:
        pytest.skip(str(missing))
