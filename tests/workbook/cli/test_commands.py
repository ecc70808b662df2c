import argparse
import json
import os
import re
import signal
import subprocess
import sys

import processes
import pytest
from processes import environment_with_package, wait_until_there
from sample_notebooks import SET_UP, hang_after, write_notebook
from stored_runs import store_run

import nsa
from workbook import runs as workbook
from workbook.cli import main as cli
from workbook.cli import options
from workbook.runs import opening
from workbook.runs.files import write_json


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder is a project with one notebook."""
    write_notebook(
        tmp_path / "notebooks" / "01_tiny.ipynb", SET_UP, "run.verdict('it ran', 'PASS', 1)"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("nsa: "), error
    return error


def printed_by(capsys, *words, code=0) -> str:
    assert cli.main([*words]) == code
    return capsys.readouterr().out


def start(*words, **options):
    command, pipe = [sys.executable, "-m", "nsa", *words], subprocess.PIPE
    environment = environment_with_package()
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, **options)


@pytest.mark.processes
def test_a_run_prints_how_it_ended_and_can_be_looked_at(place, capsys):
    file = place / "p.yaml"
    file.write_text("layers: 5\nrate: 2\n")
    words = ["run", "tiny", "-f", str(file), "-p", "layers=7", "-p", "lengths=64,128", "--quiet"]
    printed = printed_by(capsys, *words, "--timeout", "5m", "--cell-timeout", "60")
    assert ": ok" in printed and re.search("PASS +it ran", printed) and "report.html" in printed

    assert "01_tiny-" in printed_by(capsys, "runs")
    (row,) = json.loads(printed_by(capsys, "runs", "--json"))
    assert row["status"] == "ok" and row["verdict"] == "PASS"

    shown = printed_by(capsys, "show", "latest")
    assert "layers: 7" in shown and "rate: 2.0" in shown and "- 128" in shown

    assert cli.main([*words]) == 0
    assert "this run exists" in capsys.readouterr().err
    assert all(os.path.isfile(path) for path in printed_by(capsys, "report", "01_tiny").split())


@pytest.mark.processes
def test_a_reader_that_goes_early_is_no_failure(place):
    with start("notebooks") as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_notebooks_are_listed_with_question_and_parameters(place, capsys):
    printed = printed_by(capsys, "notebooks")
    assert "01_tiny\n  Does it run?" in printed
    assert "layers: int = 2" in printed and "how many (1..64)" in printed


def test_a_notebook_that_cannot_be_run_does_not_hide_the_others(place, capsys):
    write_notebook(place / "notebooks" / "00_bad.ipynb", "1", parameters=None)
    printed = printed_by(capsys, "notebooks")
    assert "cannot be run: 00_bad.ipynb has 0 cells" in printed and "layers: int" in printed


@pytest.mark.processes
@pytest.mark.full
def test_a_failed_verdict_exits_with_1(place, capsys):
    failure = "run.verdict('it is right', 'FAIL', 1)"
    write_notebook(place / "notebooks" / "01_tiny.ipynb", SET_UP, failure)
    assert cli.main(["run", "01", "--quiet"]) == cli.main(["show", "latest"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "tiny", "-p", "layer=3"], "unknown parameter 'layer'; the nearest is 'layers'"),
        (["run", "tiny", "-p", "layers=ten"], "layers wants int, got 'ten' (str)"),
        (["run", "tiny", "-p", "layers"], "'layers' is not of the form name=value, as in -p tok"),
        (["run", "tyni"], "no notebook 'tyni' in notebooks; known are 01_tiny"),
        (["run", "tiny", "-f", "gone.yaml"], "cannot read the parameter file gone.yaml"),
        (["run", "tiny", "-f", "bad.yaml"], "bad.yaml line 2 is not YAML"),
        (["run", "tiny", "--runs", "bad.yaml"], "cannot write runs to bad.yaml"),
        (["run", "tiny", "--notebooks", "none"], "no notebooks in none"),
        (["notebooks", "--notebooks", "none"], "no notebooks in none"),
        (["show", "x"], "there are no runs in runs"),
        (["report", "x"], "there are no runs in runs"),
    ],
)
def test_bad_input_is_one_clear_line_and_exits_with_2(place, capsys, words, message):
    (place / "bad.yaml").write_text("layers: [1\nrate: 2\n")
    assert cli.main(words) == 2
    assert message in one_line(capsys)
    assert not (place / "runs").exists()


REFUSED_EARLY = [
    *(["run", "tiny", "-p", given] for given in ("layers=ten", "layer=3", "backend=foo")),
    *(["estimate", given] for given in ("preset=nosuch", "tokens=abc", "backend=nosuch")),
    ["estimate", "--gpu", "nosuch"],
    *(["trial", given] for given in ("tokens=abc", "nosuch=1", "backend=nosuch")),
    ["train", "--preset", "nosuch"],
    *(["train", "--set", given] for given in ("layers=ten", "backend=nosuch")),
]


@pytest.mark.processes
def test_a_wrong_value_is_refused_before_torch_is_loaded(place):
    both = "layers: int = 2  # how many\nbackend: str = 'auto'  # which"
    write_notebook(place / "notebooks" / "01_tiny.ipynb", SET_UP, parameters=both)
    code = f"""
import sys
from workbook.cli.main import main
for words in {REFUSED_EARLY!r}:
    print(main(words), "torch" in sys.modules)
"""
    assert processes.printed_by(code).split() == len(REFUSED_EARLY) * ["2", "False"]


def test_the_version_is_told_with_where_it_is_imported_from(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    package = os.path.dirname(nsa.__file__)
    assert capsys.readouterr().out == f"nsa {nsa.__version__} from {package}\n"


def test_without_a_command_all_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert "Run a notebook into a dated folder" in printed.err and "explain" in printed.err


@pytest.mark.parametrize("words", [[], ["dance"], ["run"], ["run", "tiny", "--timeout", "soon"]])
def test_a_wrong_command_line_exits_with_2(place, capsys, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: nsa" in capsys.readouterr().err


def test_durations_have_units():
    times = {"90": 90, "90s": 90, "20m": 1200, "1.5h": 5400}
    assert {text: options.duration(text) for text in times} == times


@pytest.mark.parametrize("text", ["", "0", "-5", "5d", "m", "1m30s"])
def test_a_wrong_duration_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write 90, 90s, 20m or 2h"):
        options.duration(text)


def test_every_command_and_option_has_a_help_text_that_is_shown(capsys):
    top, commands = cli.parsers()
    assert len([name for name in commands if " " not in name]) == 16
    for parser in (top, *commands.values()):
        assert parser.description, parser.prog
        for action in parser._actions:
            assert action.help or action.choices is commands, f"{parser.prog} {action.dest}"
        with pytest.raises(SystemExit) as stopped:
            cli.main([*parser.prog.split()[1:], "--help"])
        assert stopped.value.code == 0
        assert parser.description.split()[0] in capsys.readouterr().out


@pytest.mark.processes
def test_the_environment_is_shown_as_text_and_as_json(capsys):
    assert "torch " in printed_by(capsys, "env")
    assert "gpus" in json.loads(printed_by(capsys, "env", "--json"))


def test_no_runs_are_said_and_are_an_empty_list(place, capsys):
    assert printed_by(capsys, "runs") == "no runs in runs\n"
    assert json.loads(printed_by(capsys, "runs", "--json")) == []


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu: " + 30 * "x", "A" + 120 * "y"])
def test_the_table_of_runs_fits_100_columns(place, capsys, device):
    store_run("runs", "06_case_study_settlement", gpu=device, seconds=4321.0)
    store_run("runs", "01_tiny", [("AIM MISSED", "fast")], gpu="cpu", started="2026-11-02")
    store_run("runs", "01_tiny", status="failed", started="2026-11-03", seconds=None)
    lines = printed_by(capsys, "runs").splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) == 4
    assert lines[0].split() == ["run", "ended", "lasted", "measured", "on", "commit"]
    assert "  ok " in lines[1] and "72.0 min" in lines[1] and lines[1].endswith("  cccccccc")
    assert "AIM MISSED" in lines[2] and "failed" in lines[3] and "nan" not in lines[3]


def test_a_lost_run_shows_as_lost_and_exits_with_1(place, capsys):
    folder = opening.create_folder("runs", "01_tiny-12345678")
    old = "2020-01-01T00:00:00+00:00"
    content = {"run_id": folder.name, "status": "running", "heartbeat": old, "started": old}
    write_json(folder / "record.json", content)
    assert ": lost" in printed_by(capsys, "show", "01_tiny", code=1)


def test_a_missing_package_is_said_with_the_extra_that_brings_it(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)
    monkeypatch.delattr(workbook, "engine", raising=False)
    assert cli.main(["run", "tiny"]) == 2
    assert "papermill is not installed; pip install 'nsa[notebooks]'" in one_line(capsys)


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        *(("pandas", "notebooks"), ("yaml", "notebooks"), ("nbformat", "notebooks")),
        *(("submitit", "cluster"), ("triton", "triton"), ("allpairspy", "lab")),
        *(("datasets", "text"), ("tensorboard", "tensorboard"), ("nobody_knows", "notebooks")),
    ],
)
@pytest.mark.registered
def test_a_package_is_brought_by_the_extra_that_lists_it(module, extra):
    assert cli.extra_with(module) == extra


@pytest.mark.parametrize("name", ["nope", "9", "zzz"])
def test_a_name_that_is_like_none_gets_all_there_are_and_no_guess(place, capsys, name):
    for number in range(6):
        write_notebook(place / "notebooks" / f"0{number}_other{number}.ipynb", SET_UP)
    assert cli.main(["run", name]) == 2
    error = one_line(capsys)
    assert "known are 00_other0" in error and "05_other5" in error and "nearest" not in error


def test_a_run_that_is_like_none_gets_the_latest(place, capsys):
    for number in range(8):
        folder = opening.create_folder("runs", f"01_tiny-1234567{number}")
        write_json(folder / "record.json", {"status": "ok", "started": f"2026-11-0{number + 1}"})
    assert cli.main(["show", "zzz"]) == 2
    assert "the latest are 01_tiny-12345673, " in one_line(capsys)
    assert cli.main(["show", "01_tiny-1234568"]) == 2
    assert "the nearest is '01_tiny-1234567" in one_line(capsys)


@pytest.mark.real_starts
@pytest.mark.processes
@pytest.mark.full
def test_ctrl_c_ends_the_command_with_1_and_no_traceback(place):
    ready = place / "ready"
    write_notebook(place / "notebooks" / "01_tiny.ipynb", SET_UP, hang_after(ready))
    process = start("run", "tiny", text=True)
    wait_until_there(ready, process)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert ": interrupted" in printed and "reason   the run was interrupted (Ctrl-C)" in printed
    assert "Traceback" not in error


@pytest.mark.parametrize("name", cli.GONE)
def test_a_command_that_is_gone_names_its_successor(name, capsys):
    assert cli.main([*name.split(), "02"]) == 2
    said = one_line(capsys)
    assert f"there is no nsa {name} any more; " in said
    _, commands = cli.parsers()
    new = re.search(r"\bnsa ([a-z]+)(?: ([a-z]+))?", said.partition(";")[2])
    assert "whyhung" in said or " ".join(filter(None, new.groups())) in commands or new[1] == "site"


def test_commands_of_two_words_are_listed_by_the_help_of_the_first(capsys):
    _, commands = cli.parsers()
    for two in (name for name in commands if " " in name):
        assert f"nsa {two}:" in commands[two.split()[0]].format_help()
