"""Parameters of a notebook: their declarations, and checks of given values before anything runs.

papermill checks nothing: an unknown name is a warning and `-p N ten` runs with a string.
"""

import ast
import importlib
import io
import re
import shutil
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.attention import known as backends
from nsa.spelling import nearest
from workbook.lab import CALLED, todays
from workbook.runs import identity

TYPES = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "list": list}
EXAMPLES = {"int": "4", "float": "0.5", "str": "cpu", "bool": "true"}
EXAMPLES |= {"list[int]": "128,256", "list[float]": "0.5,1.0", "list[str]": "gather,sdpa"}
EXAMPLES |= {"dict": "'{layers: [1, 2]}'", "list": "'[{layers: 1}]'"}  # of any content, as in YAML
RANGE = re.compile(r"\(\s*(-?[\d.]+?)\s*\.\.\s*(-?\d[\d.]*)?\s*\)")
CHOICES = re.compile(r"one of:?\s+([^;()]+)")
BACKENDS = re.compile(r"(^|_)backends?$")
CHECKED_BY = re.compile(r"^#\s*checked by\s+(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """One line of the cell tagged `parameters`: `layers: int = 2  # how many (1..64)`.

    A range `(low..high)` or `(low..)` and `one of: a, b` in the comment are rules, also for the
    members of a list.
    """

    name: str
    type: str
    default: Any
    help: str

    @property
    def range(self) -> tuple[float, float] | None:
        found = RANGE.search(self.help)
        return found and (float(found[1]), float(found[2] or "inf"))

    @property
    def choices(self) -> tuple[str, ...]:
        found = CHOICES.search(self.help)
        words = found[1].split(",") if found else ()
        return tuple(word.strip(" .'\"`") for word in words if word.strip())


def declared(notebook: str | Path) -> dict[str, Parameter]:
    """Parameters that a notebook declares, by name.

    ValueError if there is no cell tagged `parameters`, or a line of it has no annotation of a known
    type, no literal default or no comment.
    """
    return _of_source(_source(notebook), Path(notebook).name)


def check_together(notebook: str | Path) -> Callable[[Mapping[str, Any]], None]:
    """Function that raises ValueError for well-typed values that the notebook could not run.

    The checks are named in the parameters cell: `# checked by package.module:function`, one or
    several, each called with all values.
    """
    source = _source(notebook)
    return lambda values: _ask(source, values)


def of_kernel(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all parameters in a kernel with these `globals()`, checked as `nsa run` does.

    So plain papermill, which checks nothing, and an edited cell in JupyterLab get the same errors.
    Nothing is known of a kernel without history, as nbval's.
    """
    if not any(namespace["In"]):
        return {}
    sources = [source for source in namespace["In"] if _declares(source)]
    if not sources:
        raise ValueError("no cell that declares parameters was run; run the notebook from its top")
    known = _of_source(sources[-1], "this notebook")
    injected = [source for source in namespace["In"] if source.startswith("# Parameters\n")]
    names = [node.id for source in injected for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]  # fmt: skip
    found = check(known, {name: namespace[name] for name in dict.fromkeys([*known, *names])})
    _ask(sources[-1], found)
    return found


def _ask(source: str, values: Mapping[str, Any]) -> None:
    for line in CHECKED_BY.findall(source):
        for module, function in re.findall(r"([\w.]+):(\w+)", line):
            getattr(importlib.import_module(module), function)(values)


def _source(notebook: str | Path) -> str:
    cells, name = identity.read_cells(notebook), Path(notebook).name
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(
            f"{name} has {len(tagged)} cells tagged 'parameters'; it needs exactly one"
        )
    return "".join(tagged[0]["source"])


def _declares(source: str) -> bool:
    """True if all lines of a cell are annotated assignments, as in a parameters cell."""
    try:
        lines = ast.parse(source).body
    except SyntaxError:  # a magic, or a mistake
        return False
    return bool(lines) and all(isinstance(line, ast.AnnAssign) for line in lines)


def _of_source(source: str, notebook: str) -> dict[str, Parameter]:
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(
            f"{notebook}: line {error.lineno} of its parameters: {error.msg}"
        ) from None
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for line in lines:
        target = getattr(line, "target", None)
        if not (isinstance(line, ast.AnnAssign) and isinstance(target, ast.Name) and line.value):
            raise ValueError(
                f"{notebook}: cannot read the parameter line {ast.unparse(line)!r}; write it as "
                "`layers: int = 2  # how many`"
            )
        mine = range(line.lineno, (line.end_lineno or line.lineno) + 1)
        told = " ".join(comments[number] for number in mine if number in comments)
        kind = ast.unparse(line.annotation).replace(" ", "")
        found[target.id] = _parameter(notebook, target.id, kind, line.value, told)
    return found


def _parameter(notebook: str, name: str, kind: str, value: ast.expr, told: str) -> Parameter:
    if kind not in EXAMPLES:
        raise ValueError(f"{notebook}: {name} has type {kind}; known are {', '.join(EXAMPLES)}")
    if not told:
        raise ValueError(f"{notebook}: {name} has no comment; say what it means after a '#'")
    try:
        parameter = Parameter(name, kind, ast.literal_eval(value), told)
    except (ValueError, SyntaxError):
        message = f"{notebook}: the default of {name} is {ast.unparse(value)}; it must be a literal"
        raise ValueError(message) from None
    return replace(parameter, default=_checked(parameter, parameter.default))


def parse(text: str, kind: str) -> Any:
    """Parse one `-p name=text` of the command line as a value of type `kind`.

    Lists are `128,256` or `[128, 256]`, an item with a comma in quotes. Text that does not parse is
    returned unchanged, for `check` to reject with the parameter's name.
    """
    text = text.strip()
    if kind.startswith("list["):
        body = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        inner = kind[5:-1]
        parts = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]+)""", body)
        return [parse(part, inner) for part in parts if part.strip()]
    if kind in ("dict", "list"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    if kind == "bool":
        return {"true": True, "yes": True, "false": False, "no": False}.get(text.lower(), text)
    if kind == "str":
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        return TYPES[kind](text)
    except ValueError:
        return text


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of `name: value` lines, under today's names. ValueError names the file and
    the wrong line."""
    import yaml

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the parameter file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file, so not YAML") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ValueError(f"{path}{where} is not YAML: {problem}") from None
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(
            f"{path} line 1 holds a {type(content).__name__}, not a mapping; "
            "write one `name: value` a line"
        )
    return todays(content)


def check(declared: dict[str, Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with every value of the declared type; ValueError for the first other one."""
    found = {}
    for name, value in given.items():
        if name not in declared:
            today = CALLED.get(name)
            hint = f"it is {today!r} now" if today in declared else nearest(name, declared, 0.4)
            raise ValueError(f"unknown parameter {name!r}; {hint}")
        found[name] = _checked(declared[name], value)
    return found


def check_backends(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter `backend`, `backends` or `..._backends` that names none.

    Their names need no torch, which the registry, that checks the rest, loads.
    """
    names = ["auto", "dense", *backends.MODULES]
    for name, value in given.items():
        if BACKENDS.search(name):
            for one in [value] if isinstance(value, str) else value:
                if re.split("[:-]", one)[0] not in names:
                    raise ValueError(f"{name}={one!r} is unknown; {nearest(one, names, 0.5)}")


def filled(declared: dict[str, Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Values of all parameters, with defaults for those not `given`. Checks nothing."""
    return {name: parameter.default for name, parameter in declared.items()} | given


def _checked(parameter: Parameter, value: Any) -> Any:
    kind = parameter.type
    if not kind.startswith("list["):
        return _one(parameter, kind, value)
    if not isinstance(value, list | tuple):
        raise _wrong(parameter, value)
    return [_one(parameter, kind[5:-1], item) for item in value]


def _one(parameter: Parameter, kind: str, value: Any) -> Any:
    # True is an int in Python, and never meant by a caller of `layers=`
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise _wrong(parameter, value)
    limits, choices = parameter.range, parameter.choices
    if limits and kind in ("int", "float") and not limits[0] <= value <= limits[1]:
        low, high = (f"{limit:g}" for limit in limits)
        raise ValueError(f"{parameter.name}={value} is outside {low}..{high}")
    if choices and str(value) not in choices:
        raise ValueError(f"{parameter.name}={value!r} is unknown; {nearest(value, choices)}")
    return value


def _wrong(parameter: Parameter, value: Any) -> ValueError:
    name, kind = parameter.name, parameter.type
    got = f"{value!r} ({type(value).__name__})"
    return ValueError(f"{name} wants {kind}, got {got}; for example {name}={EXAMPLES[kind]}")


def table(parameters: dict[str, Parameter]) -> str:
    """One line a parameter: name, type, default, help."""
    width = shutil.get_terminal_size().columns
    lines = []
    for p in parameters.values():
        default = ",".join(map(str, p.default)) if isinstance(p.default, list) else p.default
        head = f"    {p.name}: {p.type} = {default}"
        both = f"{head:<44}  {p.help}"
        lines.append(both if len(both) <= max(width, 80) else f"{head}\n        {p.help}")
    return "\n".join(lines)
