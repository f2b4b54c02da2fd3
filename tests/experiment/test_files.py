"""Results folders that several runs write at the same time, and folders that go with a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fineserve_sim.experiment.run import files
from fineserve_sim.experiment.run.files import gone_if_unused, prepare


def test_a_mistake_takes_its_own_new_folder_and_no_other(tmp_path: Path) -> None:
    """Two runs start where there is no folder ``results`` yet; the one with a mistake leaves the other's alone."""
    ours, theirs = tmp_path / "results" / "ours", tmp_path / "results" / "theirs"
    with pytest.raises(ValueError, match="mistake"), gone_if_unused(ours):
        ours.mkdir(parents=True)
        theirs.mkdir()
        (theirs / "summary.json").write_text("{}")
        raise ValueError("mistake")
    assert not ours.exists()
    assert (theirs / "summary.json").exists()


def test_of_dead_writers_their_own_files_are_found_among_others(tmp_path: Path) -> None:
    """Editors and other programs leave temporary files of other names."""
    names = (".x.tmp", ".x.y.tmp", ".key.json.17.tmp", ".key.json.7.tmp", ".7.tmp", "key.7.tmp")
    for name in names:
        (tmp_path / name).touch()
    assert files.temporaries(tmp_path, {7, None}) == [tmp_path / ".key.json.7.tmp"]


def test_folders_that_were_made_for_a_mistake_go(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="mistake"), gone_if_unused(out):
        (out / "cells").mkdir(parents=True)
        raise ValueError("mistake")
    assert not (tmp_path / "a").exists()


def test_what_another_run_has_just_finished_or_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / ".key.json.7.tmp").symlink_to(tmp_path / "renamed meanwhile")
    atomic = files.atomic

    @contextmanager
    def removed_by_another(path: Path) -> Iterator[Path]:
        with atomic(path) as temporary:
            yield temporary
        path.unlink()

    monkeypatch.setattr(files, "atomic", removed_by_another)
    prepare(tmp_path)
