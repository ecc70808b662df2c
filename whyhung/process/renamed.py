"""Entry points that have moved: records of earlier runs name the old places and stay readable."""

MOVED: dict[str, str] = {}  # prefixes of modules, old to new; packages that moved theirs add them


def current(entry: str) -> str:
    """Return "module:function" under its current name; one that never moved is unchanged."""
    module, colon, name = entry.partition(":")
    for old, new in MOVED.items():
        if module == old or module.startswith(f"{old}."):
            return f"{new}{module.removeprefix(old)}{colon}{name}"
    return entry
