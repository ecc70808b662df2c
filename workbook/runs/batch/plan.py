"""A plan: a YAML file of notebooks x parameter grids, checked completely before anything runs.

plan.schema.json beside this file defines the keys.
"""

import hashlib
import itertools
import json
import math
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from nsa.spelling import nearest
from whyhung.cli import seconds
from workbook.runs import environment, identity, parameters
from workbook.runs.batch.job import Job
from workbook.runs.run import Notebook

SCHEMA = Path(__file__).with_name("plan.schema.json")
MOST = 100_000  # most jobs of a plan


@dataclass(frozen=True)
class Plan:
    """Jobs of a plan; `name` is the file's, and that of the batch's folder."""

    name: str
    path: Path
    jobs: list[Job]
    slurm: dict[str, Any] = field(default_factory=dict)


def read_plan(
    path: str | Path,
    notebooks: str | Path = "notebooks",
    slurm: dict[str, Any] | None = None,
) -> Plan:
    """Read the plan in a YAML file; settings in `slurm` override those below its `slurm:`.

    ValueError names the file and the job: a wrong key, notebook, parameter or value, a duplicate
    name, jobs that wait for each other, no job or more than 100,000.
    """
    path = Path(path)
    content = parameters.read_file(path)
    if slurm:
        content["slurm"] = (content.get("slurm") or {}) | slurm
    _check(path, content)
    count = sum(
        math.prod(map(len, one.get("grid", {}).values())) * one.get("repeats", 1)
        for one in content["jobs"]
    )
    if count > MOST:
        raise ValueError(f"{path} has {count:,} jobs, {MOST:,} are the most; make grids smaller")
    known, facts = cache(Notebook), environment.snapshot()
    jobs: dict[tuple[str, int], Job] = {}
    waits: dict[str, list[str]] = {}
    for number, one in enumerate(content["jobs"], 1):
        where = f"{path}, job {number} ({one['name']})"
        if one["name"] in waits:
            raise ValueError(f"{where}: this name comes twice; give each job its own")
        waits[one["name"]] = _several(one.get("after"))
        whole = {key: content[key] for key in ("timeout", "gpus") if key in content} | one
        try:
            notebook = identity.find_notebook(one["notebook"], notebooks)
            found = list(_expanded(whole, path.parent, known(notebook), facts))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        for job in found:
            same = jobs.setdefault((job.planned.name, job.repeat), job)
            if same is not job:
                raise ValueError(
                    f"{path}: {job.name} and {same.name} are the same run; leave one of them "
                    "out, or write `repeats: 2` where it is wanted twice"
                )
    _check_order(path, waits)
    return Plan(path.stem, path, list(jobs.values()), content.get("slurm") or {})


def _expanded(one: dict[str, Any], folder: Path, notebook: Notebook, facts: dict):
    """Jobs of an entry of the list: each combination of its grid, each repeat."""
    given: dict[str, Any] = {}
    for file in _several(one.get("file")):
        given |= parameters.read_file(folder / file)
    own, grid, repeats = one.get("parameters") or {}, one.get("grid") or {}, one.get("repeats", 1)
    if both := sorted({*grid} & {*own}):
        raise ValueError(f"{both[0]!r} is in parameters and in grid; leave one of them out")
    gpus, here = one.get("gpus"), facts["gpus"]
    if gpus != 0:  # a job sees as many as it is assigned
        facts = facts | {"gpus": here[: gpus or 1]}

    def checked_here(full: dict[str, Any]) -> bool:
        """False if the child has to check the effects of a GPU, which this machine lacks."""
        return full.get("device") != "cuda" or bool(here)

    for values in itertools.product(*grid.values()):
        cell = dict(zip(grid, values, strict=True))
        planned = notebook.planned(given | own | cell, facts, checked_here)
        name = " ".join([one["name"], *(f"{key}={_word(cell[key])}" for key in cell)])
        for repeat in range(1, repeats + 1):
            yield Job(
                f"{name} #{repeat}" if repeats > 1 else name,
                group=one["name"],
                planned=planned,
                repeat=repeat,
                repeats=repeats,
                after=tuple(_several(one.get("after"))),
                timeout_s=seconds(one["timeout"]) if "timeout" in one else None,
                gpus=gpus,
                checked=checked_here(planned.full),
            )


def _word(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return text if len(text) <= 40 else f"{text[:32]}..{digest}"


def _several(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _check(path: Path, content: dict[str, Any]) -> None:
    """Raise ValueError with the first violation of the schema, in words."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    errors = sorted(
        validator.iter_errors(content),
        key=lambda error: (str(list(error.path)), error.validator != "additionalProperties"),
    )
    if not errors:
        return
    error, where, keys = errors[0], str(path), list(errors[0].absolute_path)
    if keys[:1] == ["jobs"] and len(keys) > 1:
        _, number, *keys = keys
        job = content["jobs"][number]
        name = job.get("name") if isinstance(job, dict) else None
        where += f", job {number + 1}" + (f" ({name})" if name else "")
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        wrong = next(key for key in error.instance if key not in known)
        raise ValueError(f"{where}: unknown key {wrong!r}; {nearest(wrong, known, 0)}")
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        raise ValueError(f"{where} has no {missing!r}")
    what = ".".join(key for key in keys if isinstance(key, str)) or "job"
    wants = error.schema["description"]
    raise ValueError(f"{where}: {what} is {error.instance!r}; it wants {wants}")


def _check_order(path: Path, waits: dict[str, list[str]]) -> None:
    for name, others in waits.items():
        if unknown := [other for other in others if other not in waits]:
            near = nearest(unknown[0], waits, 0)
            raise ValueError(f"{path}: {name} is after {unknown[0]!r}, which is no job; {near}")
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = ", ".join(name for name in waits if name in error.args[1])
        raise ValueError(
            f"{path}: these jobs wait for each other: {circle}; cut an `after`"
        ) from None
