"""Two real processes on one machine, four devices each."""

import signal
import socket

import pytest

from tests.train.test_main import Process, arguments, final_hash, losses


def start(workdir, steps, **more):
    """Start both processes of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    together = ["--distributed", "--coordinator", address, "--num-processes", "2"]
    words = [*arguments(workdir, steps=steps, **more), *together]
    return [Process([*words, "--process-id", str(index)]) for index in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("one") / "run"
    code, output = Process(arguments(workdir, steps=24), num_devices=8).finish()
    assert code == 0, output
    return workdir


def test_two_processes_are_as_one_and_one_goes_on_alone(whole, tmp_path):
    """Train on two, lose one by kill -9, and finish on one: the same batches, losses within roundings."""
    workdir = tmp_path / "run"
    main, other = start(workdir, steps=24)
    main.wait_for_checkpoint(workdir)
    other.run.kill()
    assert other.finish()[0] == -signal.SIGKILL
    code, output = main.finish()
    assert code != 0 or len(losses(workdir)) == 24, output
    code, output = Process(arguments(workdir, steps=24), num_devices=4).finish()
    assert code == 0, output
    assert losses(workdir) == pytest.approx(losses(whole), rel=0, abs=1e-5)


def test_sigterm_to_one_stops_both_at_the_same_step(whole, tmp_path):
    workdir = tmp_path / "run"
    main, other = start(workdir, steps=24)
    main.wait_for_checkpoint(workdir)
    other.run.send_signal(signal.SIGTERM)
    for process in (main, other):
        code, output = process.finish()
        assert code == 0, output
    done = max(losses(workdir))
    assert done < 24
    for process in start(workdir, steps=24):
        code, output = process.finish()
        assert code == 0, output
    assert losses(workdir) == pytest.approx(losses(whole), rel=0, abs=1e-5)
    assert final_hash(workdir).keys() == final_hash(whole).keys()
