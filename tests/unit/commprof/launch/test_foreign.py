"""Test which run directory the ranks of a foreign launcher share."""

from commprof.launch.foreign import not_before
from commprof.trace.manifest import Manifest, write_manifest


def made(path, started_ns):
    path.mkdir(parents=True)
    write_manifest(path, Manifest(started_realtime_ns=started_ns))
    return path


def test_a_directory_that_is_not_there_yet_is_the_one(tmp_path):
    assert not_before(tmp_path / "train-job", 1000) == tmp_path / "train-job"


def test_the_one_that_rank_0_has_made_is_joined(tmp_path):
    run = made(tmp_path / "train-job", 1000)
    assert not_before(run, 1000) == run


def test_an_earlier_job_of_the_same_id_is_left_alone(tmp_path):
    run = made(tmp_path / "train-job", 10)
    made(tmp_path / "train-job-2", 20)
    assert not_before(run, 1000) == tmp_path / "train-job-3"
    third = made(tmp_path / "train-job-3", 1500)
    assert not_before(run, 1000) == third
