"""`nsa train` leaves at its end weights that can be loaded and gone on with, and a report."""

import json
import re

import pytest
import torch
from train_commands import TINY, Started, nsa

from nsa import load_model
from nsa.model import saving
from workbook.cli import main as cli
from workbook.rooms.training import report
from workbook.runs.files import write_json

pytestmark = pytest.mark.processes  # a run asks git for its commit


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of five steps that asked for no checkpoint."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        assert cli.main([*TINY, "--steps", "5", "--into", "runs/2026-11-24/train-1"]) == 0
    return place / "runs" / "2026-11-24" / "train-1"


def test_without_being_asked_a_run_keeps_its_last_weights_and_can_go_on(trained, capsys):
    (kept,) = saving.checkpoints(trained / "checkpoints")
    assert (
        json.loads((trained / "result.json").read_text())["weights"] == f"checkpoints/{kept.name}"
    )
    other = str(trained.parent / "train-2")
    assert cli.main([*TINY, "--steps", "7", "--resume", str(trained), "--into", other]) == 0
    printed = capsys.readouterr().out
    assert "weights  checkpoints/step-000007.pt" in printed
    assert len((trained.parent / "train-2" / "losses.csv").read_text().splitlines()) == 3


def test_a_run_can_be_gone_on_with_by_its_id(trained, capsys):
    runs = ["--runs", str(trained.parents[1])]
    assert cli.main([*TINY, "--steps", "6", "--resume", "train-1", *runs]) == 0
    assert "checkpoints/step-000006.pt" in capsys.readouterr().out
    assert cli.main([*TINY, "--steps", "6", "--resume", "train-none", *runs]) == 2
    assert "no such file or folder, and no run 'train-none' in" in capsys.readouterr().err


def test_the_weights_make_a_model_that_computes_as_the_trained_one(trained):
    tokens = torch.randint(256, (1, 48), generator=torch.Generator().manual_seed(0))
    (kept,) = saving.checkpoints(trained / "checkpoints")
    model = load_model(trained)
    assert not model.training and all(p.requires_grad for p in model.parameters())
    held = saving.read(kept)["model"]
    assert all(torch.equal(x, held[name]) for name, x in model.state_dict().items())
    other = load_model(kept, backend="masked")
    assert other.config.backend == "masked" and model.config.backend == "gather"
    torch.testing.assert_close(model(tokens)[0], other(tokens)[0])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("train-1", {"dim": 64}, "dim stays as the weights were trained with; known are"),
        ("train-1/job.json", {}, "is truncated or no checkpoint at all"),
        ("", {}, "there is no checkpoint"),
    ],
)
def test_what_gives_no_model_is_refused(trained, name, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_model(trained.parent / name, **changes)


def test_no_weights_are_kept_where_none_are_wanted(tmp_path, capsys):
    words = ["--steps", "2", "--no-weights", "--into", str(tmp_path / "r")]
    assert cli.main([*TINY, *words]) == 0
    assert not (tmp_path / "r" / "checkpoints").exists()
    assert "weights " not in capsys.readouterr().out


@pytest.mark.parametrize("asked", [False, True])
def test_a_full_disk_costs_the_last_weights_and_not_the_run_unless_they_were_asked_for(
    tmp_path, capsys, monkeypatch, asked
):
    def full(*_):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch.save does it

    monkeypatch.setattr(saving.torch, "save", full)
    words = ["--save-every", "2"] * asked
    code = cli.main([*TINY, "--steps", "2", *words, "--into", str(tmp_path / "r")])
    printed = capsys.readouterr()
    assert code == int(asked) and "No space left on device" in printed.out
    assert ("weights  not kept: No space left" in printed.out) is not asked
    assert list((tmp_path / "r").glob("checkpoints/*")) == []


def page_of(folder):
    return report.render(folder).read_text(encoding="utf-8")


def test_a_training_has_a_report_with_its_curve_settings_and_how_to_go_on(trained, capsys):
    assert cli.main(["report", "train-1", "--runs", str(trained.parents[1])]) == 0
    assert capsys.readouterr().out.split()[0] == str(trained / "report.html")
    page = (trained / "report.html").read_text(encoding="utf-8")
    losses = [line.split(",") for line in (trained / "losses.csv").read_text().splitlines()[1:]]
    first, last = (f"{float(losses[i][1]):.4f}" for i in (0, -1))
    assert f'alt="Loss from {first} to {last} nats over 5 steps"' in page
    assert "data:image/svg+xml;base64," in page and "model.nsa.window" in page
    assert "--resume runs/2026-11-24/train-1" in page and "checkpoints/step-000005.pt" in page
    assert not re.search(r"(src|href)=.(https?:)?//", page)


def test_a_report_of_a_training_that_was_cut_short_says_what_there_is(tmp_path):
    folder = tmp_path / "train-3"
    folder.mkdir()
    write_json(folder / "record.json", {"run_id": "train-3", "status": "failed", "started": "2026",
        "first_failure": {"message": "bad", "traceback": "Error: <b> & so on"}})  # fmt: skip
    page = page_of(folder)
    assert "No step was finished" in page and "Error: &lt;b&gt; &amp; so on" in page

    lines = [f"{step},{2.0 - step / 1000},{'nan' if step == 999 else 1.0}" for step in range(1000)]
    (folder / "losses.csv").write_text("\n".join(["step,loss,grad_norm", *lines]) + "\n")
    (folder / "job.json").write_text(json.dumps({"argv": ["train", "--data", "a b"]}))
    page = page_of(folder)
    assert "2.0000 at first, 1.0010 at last" in page
    assert "1 steps whose gradient norm is not finite have no point" in page
    assert "nsa train --data 'a b'" in page.replace("&#39;", "'").replace("&#x27;", "'")


def test_a_curve_of_many_steps_is_one_of_means():
    rows = [(float(step), 3.0, 1.0) for step in range(2001)]
    thin = report._thinned(rows)
    assert len(thin) <= report.MOST and thin[0] == (2.5, 3.0, 1.0)


@pytest.mark.gpu
def test_a_captured_step_on_a_gpu_leaves_weights_that_load_there(tmp_path):
    words = [word if word != "cpu" else "cuda" for word in TINY]
    into = ["--cuda-graph", "--steps", "9", "--into", str(tmp_path / "r")]
    assert cli.main([*words, *into]) == 0
    model = load_model(tmp_path / "r", "cuda")
    assert next(model.parameters()).is_cuda
    assert model(torch.zeros(1, 48, dtype=torch.long, device="cuda"))[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_ranks_end_well_where_the_one_that_writes_cannot(tmp_path, kind):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "checkpoints").write_text("in the way")
    words = ["--steps", "2", "--ranks", "2", "--parallel", kind, "--into", "r"]
    with Started(nsa(*words), tmp_path) as job:
        code, printed = job.ended()
    assert code == 0 and "weights  not kept: File exists" in printed
    assert json.loads((tmp_path / "r" / "record.json").read_text())["status"] == "ok"
