"""Models that others have trained: read and written as they publish them, and turned into Macchiato models."""

from latte_eqx.pretrained.files import Pretrained, load, save
from latte_eqx.pretrained.surgery import is_new, to_macchiato

__all__ = ["Pretrained", "is_new", "load", "save", "to_macchiato"]
