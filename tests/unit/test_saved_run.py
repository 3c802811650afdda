"""Numbers of candidates: each is given once, also after a process that was killed."""

from __future__ import annotations

from pathlib import Path

from tlt_server.trainer.process.saved_run import NUMBER, CandidateNumbers


def test_candidate_number_is_saved_before_use(tmp_path: Path) -> None:
    numbers = CandidateNumbers(tmp_path / NUMBER)
    assert numbers.last == 0 and [numbers.take(), numbers.take()] == [1, 2]
    again = CandidateNumbers(tmp_path / NUMBER)  # nothing was closed, as after a kill
    assert again.last == 2 and again.take() == 3
    again.after(7)  # a checkpoint of an earlier server
    again.after(5)
    assert again.take() == 8
    assert CandidateNumbers(tmp_path / NUMBER).last == 8
    assert [path.name for path in tmp_path.iterdir()] == [NUMBER]


def test_candidate_count_restarts_after_an_adoption(tmp_path: Path) -> None:
    numbers, counts = CandidateNumbers(tmp_path / NUMBER), []
    for adopted in (False, False, True, False, False):
        number = numbers.take()
        counts.append(numbers.before)
        if adopted:
            numbers.adopted(number)
    assert counts == [0, 1, 2, 0, 1]
    again = CandidateNumbers(tmp_path / NUMBER)
    assert again.take() == 6 and again.before == 2


def test_candidate_numbers_continue_in_memory_on_a_full_disk(tmp_path: Path) -> None:
    numbers = CandidateNumbers(tmp_path / "gone" / NUMBER)
    assert numbers.take() == 1 and "number 1 was not written" in numbers.failure
    (tmp_path / "gone").mkdir()
    assert numbers.take() == 2 and not numbers.failure
    assert CandidateNumbers(tmp_path / "gone" / NUMBER).last == 2


def test_invalid_number_file_is_named_and_counting_restarts(tmp_path: Path) -> None:
    file = tmp_path / NUMBER
    file.write_bytes(b"\xff\n")
    numbers = CandidateNumbers(file)
    assert numbers.last == 0 and str(file) in numbers.failure
    assert (numbers.take(), numbers.failure) == (1, "")
    assert CandidateNumbers(file).last == 1
