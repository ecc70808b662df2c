import hashlib
import json

import pytest
from text_packages import HELD_OUT, TRAINED, package, words

from nsa.model import shards


def build(folder, files, least=1, **options):
    """Shards of packages given as {name: {path: bytes}}."""
    for name, content in files.items():
        package(folder / "site", name, content)
    return shards.build(
        folder / "text", least, path=[str(folder / "site")], fraction=0.5, **options
    )


def whole(made, split):
    return (made.folder / f"{split}.bin").read_bytes()


def test_a_package_lies_whole_in_one_split_in_the_order_of_its_paths(tmp_path):
    made = build(
        tmp_path,
        {TRAINED: {"b/z.py": b"last", "b/a.py": b"first"}, HELD_OUT: {"a/x.md": b"held"}},
    )
    assert whole(made, "train") == b"first\0last\0"
    assert whole(made, "held-out") == b"held\0"
    assert made.manifest["packages"] == [
        [HELD_OUT, "1.0", "held-out", 1, 5],
        [TRAINED, "1.0", "train", 2, 11],
    ]


def test_the_manifest_says_which_bytes_were_made_and_again_makes_the_same(tmp_path):
    files = {TRAINED: {"b.py": words(20, 0)}, HELD_OUT: {"a.py": words(20, 1)}}
    made = build(tmp_path, files)
    for split in shards.SPLITS:
        digest = hashlib.sha256(whole(made, split)).hexdigest()
        assert made.manifest["sha256"][split] == digest
    again = shards.build(tmp_path / "again", 1, path=[str(tmp_path / "site")], fraction=0.5)
    assert (
        again.manifest == made.manifest == json.loads((made.folder / "manifest.json").read_text())
    )


def test_what_is_held_out_depends_on_the_name_alone_and_grows_with_the_fraction():
    names = [f"package-{number}" for number in range(400)]
    few, many = ([name for name in names if shards.held_out(name, f)] for f in (0.1, 0.3))
    assert set(few) < set(many) and 20 <= len(few) <= 60 and 90 <= len(many) <= 150
    assert shards.held_out("Some_Name") == shards.held_out("some-name")


def test_a_copy_of_a_trained_file_is_not_held_out(tmp_path):
    copied, other = b"the same licence", "epsilon"  # another name that is held out
    files = {TRAINED: {"b/L.txt": copied}, other: {"e/L.txt": copied, "e/x.py": b"own"}}
    made = build(tmp_path, files)
    assert whole(made, "train") == copied + b"\0"
    assert whole(made, "held-out") == b"own\0"


def test_what_is_no_text_is_left_out(tmp_path):
    large = b"x" * (shards.LARGEST + 1)
    given = {"a.so": b"binary", "b.py": b"\xff\xfe", "c.py": large, "d.py": b"a\0b", "e.py": b""}
    made = build(tmp_path, {TRAINED: given, HELD_OUT: {"x.py": b"held"}})
    (tmp_path / "site" / "b.py").unlink()
    assert whole(made, "train") == b"a b\0"


def test_max_bytes_limits_what_is_trained_on(tmp_path):
    files = {TRAINED: {"a.py": b"x" * 50, "b.py": b"y" * 50}, HELD_OUT: {"x.py": b"z" * 200}}
    made = build(tmp_path, files, max_bytes=80)
    assert whole(made, "train") == b"x" * 50 + b"\0"
    assert len(whole(made, "held-out")) == 201


def test_batches_come_from_the_mapped_bytes_of_their_split(tmp_path):
    made = build(tmp_path, {TRAINED: {"b.py": b"b" * 99}, HELD_OUT: {"a.py": b"a" * 99}})
    for split, letter in (("train", "b"), ("held-out", "a")):
        tokens, _ = made.text(split).batch(0, 2, 64)
        assert set(tokens.flatten().tolist()) <= {ord(letter), 0}
    with pytest.raises(ValueError, match="split='test' is unknown; known are train, held-out"):
        made.text("test")


def test_too_little_text_is_told_with_what_there_is_and_leaves_nothing(tmp_path):
    files = {TRAINED: {"b.py": b"b" * 99}, HELD_OUT: {"a.py": b"a"}}
    with pytest.raises(ValueError, match=r"2 installed packages .*held-out 2; at least 50 .*sympy"):
        build(tmp_path, files, least=50)
    assert list((tmp_path / "text").iterdir()) == []


def test_a_build_beside_another_in_the_same_folder_disturbs_neither(tmp_path, monkeypatch):
    files = {TRAINED: {"b.py": b"b" * 99}, HELD_OUT: {"a.py": b"a" * 99}}
    inner, read = [], shards._files

    def build_once_more(*given):
        if not inner:  # as another process would, while this one reads
            inner.append("begun")
            with monkeypatch.context() as other:
                other.setattr(shards.os, "getpid", lambda: 0)
                again = shards.build(tmp_path / "text", 1, path=[site], fraction=0.5)
            inner[:] = [again.manifest]
        return read(*given)

    site = str(tmp_path / "site")
    monkeypatch.setattr(shards, "_files", build_once_more)
    made = build(tmp_path, files)
    assert inner == [made.manifest] and shards.opened(made.folder) == made
    assert len(list(made.folder.iterdir())) == 3


def test_shards_are_opened_only_as_they_were_written(tmp_path):
    made = build(tmp_path, {TRAINED: {"b.py": b"b" * 99}, HELD_OUT: {"a.py": b"a" * 99}})
    assert shards.opened(made.folder) == made
    (made.folder / "train.bin").write_bytes(b"b" * 98)
    with pytest.raises(ValueError, match=r"train.bin is not what its manifest says"):
        shards.opened(made.folder)
    with pytest.raises(ValueError, match=r"holds no text shards .*build writes them"):
        shards.opened(tmp_path)
    (made.folder / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="holds 'other', this library reads"):
        shards.opened(made.folder)


def test_the_record_has_the_hash_of_the_versions_instead_of_all_packages(tmp_path):
    made = build(tmp_path, {TRAINED: {"b.py": b"b"}, HELD_OUT: {"a.py": b"a"}})
    record = made.record()
    assert "packages" not in record and record["bytes"] == {"train": 2, "held-out": 2}
    made.manifest["packages"][0][1] = "2.0"
    assert made.record()["packages_sha256"] != record["packages_sha256"]
