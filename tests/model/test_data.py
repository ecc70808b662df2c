"""What the model reads: repeatable, stateless, and clear about what it cannot read."""

import os
from itertools import combinations

import pytest
import torch

from nsa.model.data import synthetic, text

SOURCES = {"synthetic": synthetic, "text": text}


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]


def test_a_batch_is_int64_tokens_and_each_ones_successor(source):
    tokens, targets = source().batch(0, 3, 65)
    assert tokens.shape == targets.shape == (3, 65)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < 256
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_a_batch_depends_on_seed_and_step_alone(source):
    first, again = source(seed=1), source(seed=1)
    later = first.batch(7, 2, 32)[0]
    again.batch(0, 5, 9)
    torch.rand(3)
    assert torch.equal(again.batch(7, 2, 32)[0], later)
    seen = [source(seed=seed).batch(step, 2, 32)[0] for seed in (1, 2) for step in (0, 1)]
    assert not any(torch.equal(one, other) for one, other in combinations(seen, 2))


def test_a_batch_leaves_the_global_random_state_alone(source):
    before = torch.get_rng_state()
    source().batch(0, 2, 32)
    assert torch.equal(torch.get_rng_state(), before)


def test_synthetic_tokens_use_the_whole_vocabulary():
    tokens, _ = synthetic(vocab=5).batch(0, 4, 200)
    assert tokens.unique().tolist() == [0, 1, 2, 3, 4]


def test_the_standard_library_is_many_megabytes_of_text_without_what_was_installed_later():
    read = text()
    assert len(read.data) > 5e6
    assert (read.data < 128).float().mean() > 0.95
    parts = {part for file in read.files for part in file.parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__"}
    assert {file.suffix for file in read.files} == {".py"}


def test_text_names_no_folder_of_this_machine_unless_the_user_did(tmp_path):
    assert "/" not in text().record()["name"]
    (tmp_path / "a").write_bytes(b"ab")
    assert text(tmp_path).record()["name"] == str(tmp_path)


def test_the_tokens_are_the_files_bytes_binary_ones_too(tmp_path):
    file = tmp_path / "all"
    file.write_bytes(bytes(range(256)))
    tokens, targets = text(file).batch(3, 1, 255)
    assert tokens.tolist() == [list(range(255))]
    assert targets.tolist() == [list(range(1, 256))]


def test_every_place_can_be_drawn_the_first_and_the_last_included(tmp_path):
    file = tmp_path / "few"
    file.write_bytes(b"abcd")
    tokens, _ = text(file).batch(0, 200, 1)
    assert {chr(token) for token in tokens.flatten()} == {"a", "b", "c"}


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name, content in {"b/2": b"fourth", "a": b"first", "b/1": b"third", "c": b"second"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert bytes(text(tmp_path).data.tolist()) == b"firstsecondthirdfourth"


def test_reading_stops_at_max_bytes(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    assert bytes(text(tmp_path, max_bytes=15).data.tolist()) == b"a" * 10 + b"b" * 5


def test_nothing_is_read_before_the_first_batch(tmp_path):
    file = tmp_path / "late"
    file.write_bytes(b"early")
    named = text(file)
    file.write_bytes(b"later")
    assert bytes(named.data.tolist()) == b"later"


def test_the_record_tells_whether_two_machines_read_the_same_bytes(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / name).write_bytes(b"abc" if name != "other" else b"abd")
    one, same, other = (text(tmp_path / name).record() for name in ("one", "same", "other"))
    assert one["sha256"] == same["sha256"] != other["sha256"]
    assert one["bytes"] == 3


@pytest.mark.parametrize(
    "spoil",
    # a link to memory opens, but its first page is not there
    [os.mkfifo, lambda path: path.symlink_to("/proc/self/mem")],
    ids=["a pipe", "unreadable"],
)
def test_what_cannot_be_read_is_left_out_of_a_folder(tmp_path, spoil):
    spoil(tmp_path / "spoilt")
    (tmp_path / "file").write_bytes(b"ab")
    assert len(text(tmp_path).data) == 2


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "missing", "missing: got 0 bytes, there is no such"),
        (lambda folder: folder, "got 0 bytes, no file was found"),
        (lambda folder: "/dev/null", "/dev/null: got 0 bytes, no file was found"),
        (lambda folder: "/proc/self/mem", r"/proc/self/mem: got 0 bytes .*\(mem: .+\)"),
    ],
    ids=["missing", "empty folder", "no regular file", "unreadable"],
)
def test_a_path_with_nothing_to_read_is_refused_by_name(tmp_path, make, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        text(make(tmp_path)).batch(0, 1, 1)
    assert "; name a" in str(caught.value) or "; name one" in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty: got 0 bytes from 1 file"):
        text(tmp_path / "empty").batch(0, 1, 1)


def test_text_shorter_than_a_passage_says_how_much_it_has_and_needs(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"x" * 10)
    text(file).batch(0, 1, 9)
    with pytest.raises(ValueError, match=r"short: got 10 bytes, .*10 tokens.*need 11;.*at most 9"):
        text(file).batch(0, 1, 10)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_sizes_below_one_are_refused(source, sizes):
    with pytest.raises(ValueError, match="needs step >= 0, batch >= 1 and tokens >= 1"):
        source().batch(*sizes)


def test_a_vocabulary_or_a_text_of_one_is_refused():
    with pytest.raises(ValueError, match="vocab=1"):
        synthetic(vocab=1)
    with pytest.raises(ValueError, match="max_bytes=1"):
        text(max_bytes=1)
