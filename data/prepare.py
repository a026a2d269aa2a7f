"""Turn texts, or examples of a task, into a prepared directory of tokens, once, before training.

    python -m data.prepare text FILE_OR_DIRECTORY... --out DIR
    python -m data.prepare openwebtext --out DIR
    python -m data.prepare lra-listops --out DIR

A further data set is a function with typed arguments, and a line in `COMMANDS`.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from data import lra, openwebtext
from data.mqar import prepare_mqar
from data.prepared import Manifest
from data.preparing import progress, say_what_was_made
from data.same_book import prepare_same_book
from data.sources import Advance, Piece, TextFiles, find_files, split_pieces
from data.tokenizer import AnyTokenizer, load_tokenizer
from data.writing import Writer, check_free, writing

BATCH_CHARACTERS = 2**22
"""So many characters are encoded together: enough to keep all cores busy, few enough to hold their encodings."""


def prepare_text(
    paths: tyro.conf.Positional[Sequence[Path]],
    out: Path,
    *,
    tokenizer: str = "bytes",
    valid: Sequence[Path] = (),
    valid_fraction: float = 0.1,
    document_separator: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    r"""Prepare text files in UTF-8.

    These are .txt files and .jsonl files (one {"text": "..."} per line), plain or compressed (.gz, .xz). A .txt file is
    one document unless a separator splits it. Blank documents are left out. A .txt file without a separator is read
    piece by piece, however large it is; of all others one document at a time is held in memory.

    Args:
        paths: Files, and directories that are searched for such files.
        out: The directory to make.
        tokenizer: bytes (257 ids), gpt2 (its byte-pair encoding, 50,257 ids), or the file tokenizer.json of a
            pretrained model.
        valid: Files and directories to validate on, which are not trained on even if they are among the paths. Without
            them a part of the input is set aside.
        valid_fraction: That part. Of a single document it is the end of the text; of many, the documents whose hash
            says so, which keeps copies together and does not depend on their order. 0 means no validation data.
        document_separator: What stands between two documents of a .txt file; \n and \t are understood.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    if not 0 <= valid_fraction < 1:
        raise ValueError(f"`valid_fraction` must be in [0, 1), got {valid_fraction}.")
    separator = document_separator and document_separator.replace("\\n", "\n").replace("\\t", "\t")
    if separator == "":
        raise ValueError("`document_separator` must not be empty.")
    validation = TextFiles(find_files(valid), separator) if valid else None
    training = TextFiles(find_files(paths, without=validation.paths if validation else ()), separator)
    source = {
        "kind": "text",
        "paths": [str(path) for path in paths],
        "valid": [str(path) for path in valid] or valid_fraction,
        "document_separator": separator,
    }
    return _prepare(
        functools.partial(split_pieces, training, validation, valid_fraction),
        out,
        tokenizer=load_tokenizer(tokenizer),
        splits=("train", "valid") if valid or valid_fraction else ("train",),
        source=source,
        total=training.size + (validation.size if validation else 0),
        overwrite=overwrite,
        quiet=quiet,
    )


def prepare_openwebtext(
    out: Path,
    *,
    source: str = openwebtext.NAME,
    overwrite: bool = False,
    quiet: bool = False,
) -> Manifest:
    """Prepare OpenWebText as GPT-2 tokens: 8,013,769 documents, 0.05 % of them for validation.

    Needs Hugging Face `datasets` (pip install 'latte-eqx[openwebtext]'), about 55 GB for its cache and 18 GB for the
    result. What is downloaded stays in the cache, so that an interrupted run begins anew without downloading again.

    Args:
        out: The directory to make.
        source: A data set on the hub; or a local file (.jsonl, .parquet) or directory with a column `text`.
        overwrite: Replace prepared data that is there already.
        quiet: Show no progress.
    """
    check_free(Path(out), overwrite=overwrite)
    splits = openwebtext.load(source)
    return _prepare(
        functools.partial(openwebtext.pieces, splits),
        out,
        tokenizer=load_tokenizer("gpt2"),
        splits=tuple(splits),
        source={"kind": "openwebtext", "source": source},
        total=sum(map(len, splits.values())),
        overwrite=overwrite,
        quiet=quiet,
    )


def _prepare(
    pieces: Callable[[Advance], Iterable[Piece]],
    out: Path,
    *,
    tokenizer: AnyTokenizer,
    splits: tuple[str, ...],
    source: dict[str, Any],
    total: int,
    overwrite: bool,
    quiet: bool,
) -> Manifest:
    """Encode and write all pieces. `total` is the sum of what `pieces` reports as its advance."""
    with writing(Path(out), tokenizer, splits=splits, overwrite=overwrite) as writer:
        with progress(total, quiet) as advance:
            _encode(pieces(advance), tokenizer, writer)
        manifest = writer.finish(source)
    say_what_was_made(out, manifest, quiet)
    return manifest


def _encode(pieces: Iterable[Piece], tokenizer: AnyTokenizer, writer: Writer) -> None:
    for batch in _batches(pieces):
        for piece, tokens in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            writer.append(piece.split, tokens)
            if piece.ends:
                writer.end_document(piece.split)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


COMMANDS = {
    "text": prepare_text,
    "openwebtext": prepare_openwebtext,
    "lra-listops": lra.prepare_listops,
    "lra-text": lra.prepare_reviews,
    "lra-image": lra.prepare_cifar,
    "lra-pathfinder": lra.prepare_pathfinder,
    "lra-retrieval": lra.prepare_retrieval,
    "same-book": prepare_same_book,
    "mqar": prepare_mqar,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of `COMMANDS` as the command line says."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="python -m data.prepare", description=__doc__, args=arguments
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing was finished, run it again")


if __name__ == "__main__":
    main()
