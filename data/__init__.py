"""From text to batches: tokenizers, preparation, packing and the loader."""

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus" / "tinyshakespeare.txt"
"""The shipped English text: 1.1 MB of Shakespeare, in the public domain."""
