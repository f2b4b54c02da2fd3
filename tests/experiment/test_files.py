"""Results folders that one run at a time writes, and folders that go with a mistake."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fineserve_sim.experiment import load_experiment, run_loaded
from fineserve_sim.experiment.file.errors import MachineError
from fineserve_sim.experiment.run import files
from fineserve_sim.experiment.run.files import alone_in, gone_if_unused, prepare


def test_a_mistake_takes_its_own_new_folder_and_no_other(tmp_path: Path) -> None:
    """Two runs start where there is no folder ``results`` yet; the one with a mistake leaves the other's alone."""
    ours, theirs = tmp_path / "results" / "ours", tmp_path / "results" / "theirs"
    with pytest.raises(ValueError, match="mistake"), gone_if_unused(ours):
        theirs.mkdir(parents=True)
        (theirs / "summary.json").write_text("{}")
        raise ValueError("mistake")
    assert not ours.exists()
    assert (theirs / "summary.json").exists()


HOLDS = """
import sys
from pathlib import Path
from fineserve_sim.experiment.run.files import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    input()
"""


@contextmanager
def another_run(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the folder."""
    command = [sys.executable, "-c", HOLDS, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_run_into_a_folder_is_refused_until_the_first_has_ended(
    write_file, fake: ModuleType, tmp_path: Path
) -> None:
    """Even by SIGKILL. The error is one line with the folder and the process, and the folder stays as it is."""
    out = tmp_path / "out"
    experiment = load_experiment(write_file())
    with another_run(out) as process:
        with pytest.raises(MachineError) as told:
            run_loaded(experiment, out, jobs=1, simulate=fake.simulate)
        assert str(told.value).startswith(f"{out}: process {process.pid} on ")
        assert str(told.value).endswith("writes results into this folder; wait for it, or name another folder")
        with pytest.raises(MachineError), gone_if_unused(out):
            raise AssertionError("it came in")
        assert sorted(path.name for path in out.rglob("*")) == [".lock", "cells"]
    assert run_loaded(experiment, out, jobs=1, simulate=fake.simulate).exists()
    assert not (out / ".lock").exists()


def test_one_run_may_be_in_its_folder_twice_and_two_threads_may_not(tmp_path: Path) -> None:
    out, refused = tmp_path / "out", pytest.raises(MachineError, match=f"process {os.getpid()} on ")
    with alone_in(out), alone_in(out), ThreadPoolExecutor(1) as threads, refused:
        threads.submit(alone_in(out).__enter__).result()
    with alone_in(out):
        prepare(out)


def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with alone_in(tmp_path / "out"):
        prepare(tmp_path / "out")


def test_of_dead_writers_their_own_files_are_found_among_others(tmp_path: Path) -> None:
    """Editors and other programs leave temporary files of other names."""
    names = (".x.tmp", ".x.y.tmp", ".key.json.17.tmp", ".key.json.7.tmp", ".7.tmp", "key.7.tmp")
    for name in names:
        (tmp_path / name).touch()
    assert files.temporaries(tmp_path, {7, None}) == [tmp_path / ".key.json.7.tmp"]


def test_folders_that_were_made_for_a_mistake_go(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with pytest.raises(ValueError, match="mistake"), gone_if_unused(out):
        prepare(out)
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
