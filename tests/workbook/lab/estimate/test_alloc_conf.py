"""Settings of PYTORCH_CUDA_ALLOC_CONF, and what is refused of it."""

import math

import pytest
import torch

from workbook.lab.estimate.alloc_conf import MIB, Settings


def test_nothing_set_is_torchs_default():
    assert Settings.parse("") == Settings()
    assert (Settings().large_segment, Settings().max_split) == (20 * MIB, math.inf)


def test_settings_are_read_as_torch_reads_them():
    text = (
        "max_split_size_mb:64, garbage_collection_threshold:0.8,expandable_segments:True,"
        "large_segment_size_mb:32,per_process_memory_fraction:0.5,pinned_use_background_threads:True,"
    )
    assert Settings.parse(text) == Settings(
        max_split=64 * MIB,
        threshold=0.8,
        expandable=True,
        large_segment=32 * MIB,
        max_rounding=32 * MIB,
        fraction=0.5,
    )


def test_parts_hold_from_their_size_on_and_the_first_from_0():
    parts = Settings.parse("roundup_power2_divisions:[64:8,128:2,512:4,>:1]").roundup
    #         1  2  4  8 16 32 64 MiB, 128, 256 (not named: none), 512, the rest
    assert parts == (8, 8, 8, 8, 8, 8, 8, 2, 0, 4, 1, 1, 1, 1, 1, 1)
    assert Settings.parse("roundup_power2_divisions:4").roundup == (4,) * 16


@pytest.mark.parametrize(
    ("parts", "size", "rounded"),
    [
        ("", 0, 512),
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("4", 1200, 1536),  # too small for parts: they would be less than a block
        ("4", 2048, 2048),
        ("4", 2049, 2560),  # 2048, 2560, 3072, 3584, 4096
        ("4", 3 * MIB, 3 * MIB),
        ("4", 3 * MIB + 1, 7 * MIB // 2),
        ("[4:1,>:2]", 3 * MIB + 1, 3 * MIB + 512),
        ("[4:1,>:2]", 9 * MIB, 12 * MIB),
    ],
)
def test_rounding(parts, size, rounded):
    settings = Settings.parse(f"roundup_power2_divisions:{parts}" if parts else "")
    assert settings.rounded(size) == rounded


REFUSED = {
    "max_split_size_mb:10": "too small; the nearest is 20",
    "large_segment_size_mb:40,max_split_size_mb:30": "too small; the nearest is 40",
    "large_segment_size_mb:10": "too small; the nearest is 11",
    "max_non_split_rounding_mb:19": "too small; the nearest is 20",
    "max_split_size_mb:many": "no whole number of MiB",
    "max_split_size_mb": "has no value",
    "max_split_size_mb=64": "has no value",
    "roundup_power2_divisions:3": "no power of 2; the nearest are 2 and 4",
    "roundup_power2_divisions:[100:4]": "no power of 2; the nearest are 64 and 128",
    "expandable_segments:true": "neither True nor False",
    "garbage_collection_threshold:1.0": "between 0 and 1",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused_and_says_what_would_do(text):
    with pytest.raises(ValueError, match=REFUSED[text]):
        Settings.parse(text)
    torchs = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if torchs is not None and not torch.cuda.is_available():  # else it would change this process
        with pytest.raises((ValueError, RuntimeError)):
            torchs(text)
        torchs("large_segment_size_mb:20")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_split_size:64", "no setting 'max_split_size'; the nearest is 'max_split_size_mb'"),
        ("expandable_segment:True", "the nearest is 'expandable_segments'"),
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("backend:cudaMallocAsync", "only native is modelled"),
        ("throw_on_cudamalloc_oom:True", "not modelled"),
    ],
)
def test_what_is_unknown_or_not_modelled_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Settings.parse(text)
