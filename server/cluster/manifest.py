"""What a run of `penstock ray embed` has done so far: the files of its output, each of which is there whole or not.

The folder OUT holds `_manifest.json` (what the run is) and a file for each piece that is done. There is no list beside
them that could say otherwise. A file is written under another name and moved into its place: that of a process that was
killed has no meaning, and two that did the same piece leave one file.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.engine.model_files.json_files import one_line

from ..settings import CommandError, UsageError
from .pieces import Piece

MANIFEST: Final = "_manifest.json"
_UNFINISHED: Final = ".unfinished-"


class Output:
    """The folder of the output. Knows no lock: whoever does a piece twice writes the same file.

    Args:
        folder: That all machines share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begins a run, or goes on with one.

        Args:
            identity: Everything that decides the rows; a run goes on only where all of it is equal.
            overwrite: Delete what another run has left, or this one when it was finished.

        Raises:
            UsageError: The folder holds something else.
            CommandError: It cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self._clear()
            held = self._read()
            if held is None:
                if others := sorted(
                    path.name for path in self.folder.iterdir() if not path.name.startswith(_UNFINISHED)
                ):
                    raise UsageError(f"OUT: {self.folder} holds {others[0]}; name a folder that is new or empty")
                self._write({"identity": identity, "finished": False})
                return
        except OSError as error:
            raise CommandError(f"OUT: {self.folder} cannot be written: {error.strerror or error}") from error
        differing = [key for key, value in identity.items() if held["identity"].get(key) != value]
        if differing:
            raise UsageError(
                f"OUT: {self.folder} holds a run with another {', '.join(differing)}; name another folder, or give "
                "--overwrite to replace it"
            )
        if held["finished"]:
            raise UsageError(f"OUT: {self.folder} is finished; give --overwrite to replace it")

    def left(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Returns the pieces that have no file yet, or a damaged one."""
        return [piece for piece in pieces if not self.has(piece)]

    def has(self, piece: Piece) -> bool:
        """Whether a piece is done: its file is whole, and has its rows."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return bool(parquet.read_metadata(self.folder / piece.file_name).num_rows == piece.num_rows)
        except (pa.ArrowException, OSError):
            return False

    def write(self, piece: Piece, table: Any) -> None:
        """Writes the file of a piece and returns when it is safe. `table` is a pyarrow.Table.

        Raises:
            OSError: The disk refuses.
        """
        from pyarrow import parquet

        unfinished = self.folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            parquet.write_table(table, unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(self.folder / piece.file_name)
        finally:
            unfinished.unlink(missing_ok=True)

    def finish(self, identity: Mapping[str, Any]) -> None:
        """Says that all pieces are done, and removes what killed processes have left."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)
        self._write({"identity": identity, "finished": True})

    def _clear(self) -> None:
        """Deletes what a run has left, and nothing else."""
        if (self.folder / MANIFEST).exists():
            for pattern in ("part-*.parquet", f"{_UNFINISHED}*", MANIFEST):
                for path in self.folder.glob(pattern):
                    path.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            held = json.loads(path.read_bytes())
            if isinstance(held["identity"], dict) and isinstance(held["finished"], bool):
                return dict(held)
            reason = "it says of no run what it is"
        except (ValueError, KeyError, TypeError) as error:
            reason = one_line(error)
        raise UsageError(f"OUT: {path} is damaged ({reason}); give --overwrite to start over")

    def _write(self, manifest: Mapping[str, Any]) -> None:
        unfinished = self.folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        unfinished.write_text(json.dumps(manifest, indent=2))
        unfinished.replace(self.folder / MANIFEST)
