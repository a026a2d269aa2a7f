import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from train.workdir import WorkDirectoryError, differences, open_workdir


def holder(path: Path) -> subprocess.Popen:
    """Another process that holds the lock of `path`."""
    text = (
        "import sys, time; from train.workdir import open_workdir\n"
        "workdir = open_workdir(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", text, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def kill(process: subprocess.Popen):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_second_writer_is_refused_until_the_first_is_killed(tmp_path):
    first = holder(tmp_path)
    try:
        for fresh in (False, True):
            with pytest.raises(WorkDirectoryError, match=rf"at a time, got a second one beside process {first.pid} on"):
                open_workdir(tmp_path, fresh=fresh, overwrite=fresh)
        assert open_workdir(tmp_path, is_main=False).path == tmp_path
    finally:
        kill(first)
    open_workdir(tmp_path).close()


def test_second_writer_in_one_process_is_refused_until_the_first_closes(tmp_path):
    with (
        open_workdir(tmp_path / "run"),
        pytest.raises(WorkDirectoryError, match=f"beside process {os.getpid()} on"),
    ):
        open_workdir(tmp_path / "run")
    open_workdir(tmp_path / "run").close()


def test_config_is_read_as_it_was_written(tmp_path):
    config = {"optim": {"peak_lr": 5e-4, "betas": [0.9, 0.95]}, "name": "né", "none": None}
    with open_workdir(tmp_path) as workdir:
        assert workdir.read_config() is None
        workdir.write_config({"old": 1})
        workdir.write_config(config)
        assert workdir.read_config() == config
        assert sorted(os.listdir(tmp_path)) == ["config.json", "lock"]
        other = open_workdir(tmp_path, is_main=False)
        other.write_config({})
        assert other.read_config() == config
        workdir.config.write_text("{")
        with pytest.raises(WorkDirectoryError, match=r"config\.json must be JSON"):
            workdir.read_config()


def test_config_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with open_workdir(tmp_path) as workdir:
        workdir.write_config({"old": 1})
        with pytest.raises(TypeError):
            workdir.write_config({"new": object()})
        assert workdir.read_config() == {"old": 1}


@pytest.mark.parametrize("trace", ["config.json", "metrics.jsonl", "checkpoints/10/state"])
def test_fresh_run_does_not_overwrite(tmp_path, trace):
    path = tmp_path / "run"
    with open_workdir(path, fresh=True) as workdir:
        workdir.checkpoints.mkdir()
    open_workdir(path, fresh=True).close()
    (path / trace).parent.mkdir(parents=True, exist_ok=True)
    (path / trace).write_text("precious")

    open_workdir(path).close()
    with pytest.raises(WorkDirectoryError, match=r"Leave out `fresh`.*run\.old-1"):
        open_workdir(path, fresh=True)
    for number in (1, 2):
        with open_workdir(path, fresh=True, overwrite=True) as workdir:
            assert os.listdir(path) == ["lock"]
            workdir.write_config({"number": number})
            with pytest.raises(WorkDirectoryError, match="second one"):
                open_workdir(path)
    assert (tmp_path / "run.old-1" / trace).read_text() == "precious"
    assert "1" in (tmp_path / "run.old-2" / "config.json").read_text()


def test_overwrite_without_fresh_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must come with `fresh`"):
        open_workdir(tmp_path, overwrite=True)


def test_unwritable_directory_is_refused_at_once():
    directory = Path(tempfile.mkdtemp())
    (directory / "run").mkdir()
    user = os.geteuid()
    for path in (directory / "run", directory):
        path.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        for path in (directory / "run", directory / "new"):
            with pytest.raises(WorkDirectoryError, match=f"must be writable, got {path}: .*Permission denied"):
                open_workdir(path)
    finally:
        os.seteuid(user)
        directory.chmod(0o755)
        shutil.rmtree(directory)
    with pytest.raises(WorkDirectoryError, match="must be writable, got"):
        open_workdir(__file__)


def test_differences_name_each_value():
    old = {"optim": {"peak_lr": 0.0005, "betas": (0.9, 0.95), "clip": {}}, "steps": 10, "gone": None}
    new = {"optim": {"peak_lr": 0.001, "betas": [0.9, 0.95], "clip": {"norm": 1.0}}, "steps": 10, "path": "a"}
    assert differences(old, new) == [
        "optim.peak_lr: 0.0005 -> 0.001",
        "optim.clip: {} -> nothing",
        "gone: None -> nothing",
        "optim.clip.norm: nothing -> 1.0",
        "path: nothing -> 'a'",
    ]
    assert differences(old, old) == []
    assert differences({"a": 1}, {"a": {"b": 1}}) == ["a: 1 -> nothing", "a.b: nothing -> 1"]
    assert differences({"flag": True}, {"flag": 1}) == ["flag: True -> 1"]
