"""What trials can vary, by subject: every subject's factors, and those of the training step here.

Any other subject has the settings it likes: a factor that nobody here knows is handed to it.
"""

from nsa.lab.search.factor import COMMON, Factor, Rule, text
from nsa.lab.search.training_factors import RULES, TRAINING
from nsa.spelling import nearest

TRAINING_SUBJECT = "nsa.lab.search.training_subject:make"
ENVIRONMENT = "env."  # env.NAME of any subject is an environment variable of its process
CALLED = {
    "T": "tokens",
    "S": "tokens",
    "dtypes": "dtype",
    "precision": "dtype",
    "version": "python",
}


def known(subject: str) -> dict[str, Factor]:
    """The factors of a subject that are known here."""
    if subject != TRAINING_SUBJECT:
        return COMMON
    return COMMON | TRAINING


def find(subject: str, name: str) -> Factor | None:
    """The factor of that name; None where another subject may know it.

    Raises ValueError for one that the training subject does not have, naming the nearest.
    """
    factors = known(subject)
    if name in factors:
        return factors[name]
    if name.startswith(ENVIRONMENT) and len(name) > len(ENVIRONMENT):
        variable = name.removeprefix(ENVIRONMENT)
        return Factor(
            name, "", text, f"the environment variable {variable}", place="spec",
            env=lambda value: {variable: value} if value else {},
        )  # fmt: skip
    if subject != TRAINING_SUBJECT:
        return None
    raise ValueError(f"unknown factor {name!r}; {nearest(CALLED.get(name, name), factors)}")


def rules(subject: str) -> tuple[Rule, ...]:
    """What does not go together for a subject."""
    if subject != TRAINING_SUBJECT:
        return ()
    return RULES
