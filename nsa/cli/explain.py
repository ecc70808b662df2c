"""`nsa explain`: why a trial was judged as it was, on one page."""

from pathlib import Path

from nsa.cli.options import FAILED, GOOD, command, trials_option


def add(commands) -> None:
    """Its parser."""
    text = (
        "Explain a trial: its verdict, the rule that applied, and the evidence that it read. "
        "Exit code 0 if it passed."
    )
    made = command(commands, "explain", explain, text)
    made.add_argument("trial", metavar="TRIAL", help="id, its beginning, its folder, or latest")
    made.add_argument("--markdown", action="store_true", help="as markdown, for a notebook")
    made.add_argument("--again", action="store_true", help="judge it anew, by today's rules")
    trials_option(made)


def explain(arguments) -> int:
    from nsa.lab.search.ledger import Ledger
    from nsa.lab.verdict import judge
    from nsa.lab.verdict.explain import page

    given = Path(arguments.trial)
    if (given / "evidence.json").is_file():
        ledger, name = Ledger(given.resolve().parent), given.resolve().name
    else:
        ledger = Ledger(arguments.trials)
        name = find(ledger.ids(), arguments.trial, arguments.trials)
    found = ledger.get(name)
    if found is None:
        raise ValueError(f"trial {name} in {ledger.root} cannot be read")
    evidence, verdict = found
    if arguments.again:
        verdict = judge(evidence)
    print(page(evidence, verdict, name=name, markdown=arguments.markdown), end="")
    return GOOD if verdict.kind == "PASS" else FAILED


def find(ids: list[str], text: str, where: str) -> str:
    """The one id that `text` begins, or the latest; ValueError tells what there is instead."""
    if not ids:
        raise ValueError(f"no trials in {where}; name another folder: --trials")
    if text == "latest":
        return ids[-1]
    if text in ids:
        return text
    found = [id for id in ids if id.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{text!r} begins {len(found)} trials: {', '.join(found[:5])}; write more")
    latest = ", ".join(ids[-3:])
    raise ValueError(f"no trial {text!r} among {len(ids)} in {where}; the latest are {latest}")
