"""What a trial printed: the last lines of it, and never more on the disk than there is room for."""

import os

from whyhung.process import printed
from whyhung.process.printed import LINES, Printed


def test_the_last_lines_are_those_of_both_streams(tmp_path):
    (tmp_path / "stdout.txt").write_text("".join(f"step {i}\n" for i in range(100)))
    (tmp_path / "stderr.txt").write_text("0%\r50%\r100%\n\nusage: train.py\n")
    last = Printed(tmp_path).last()
    assert len(last) == LINES and last[-2:] == ["100%", "usage: train.py"]
    assert last[-3] == "step 99" and last[0] == "step 82"
    assert Printed(tmp_path / "nothing").last() == []


def test_of_ranks_the_first_to_fail_is_shown_beside_rank_0(tmp_path):
    for rank in range(4):
        file = tmp_path / "logs" / "none" / "attempt_0" / str(rank) / "stdout.log"
        file.parent.mkdir(parents=True)
        file.write_text(f"hello {rank}\n")
    assert Printed(tmp_path).last(4, 2) == ["rank 0: hello 0", "rank 2: hello 2"]


def test_output_without_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "MOST", 2**20)
    monkeypatch.setattr(printed, "KEPT", 2**12)
    seen = Printed(tmp_path)
    with open(tmp_path / "stdout.txt", "ab", buffering=0) as stream:
        for i in range(30):
            stream.write(b"noise\n" * 50_000 + f"line {i}\n".encode())
            seen._next = 0.0
            seen.bound()
            used = sum(one.stat().st_blocks * 512 for one in tmp_path.iterdir())
            assert used < 2**21
    assert "only the end" in seen.note() and seen.last()[-1] == "line 29"
    os.truncate(tmp_path / "stdout.txt", 0)  # it stood still right after it was cut
    assert seen.last()


def test_what_is_short_is_kept_whole(tmp_path):
    (tmp_path / "stdout.txt").write_text("one\n")
    seen = Printed(tmp_path)
    seen.bound()
    assert seen.note() == "" and seen.last() == ["one"]
