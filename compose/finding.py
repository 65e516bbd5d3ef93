"""What ``baton doctor`` found: one line about one thing, and what to do about it."""

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    SKIPPED = "skip"  # could not be looked at, or does not apply
    WARNING = "warn"  # works, and not as well as it could
    FAILED = "FAIL"  # does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result."""

    verdict: Verdict
    subject: str
    what: str
    fix: str = ""
    """What to do; never empty for a warning or a failure."""

    def lines(self) -> str:
        """Return the finding for a terminal."""
        head = f"{self.verdict:<5} {self.subject}: {self.what}"
        return f"{head}\n      fix: {self.fix}" if self.fix else head


def ok(subject: str, what: str) -> Finding:
    """Return that all is well."""
    return Finding(Verdict.OK, subject, what)


def skipped(subject: str, why: str) -> Finding:
    """Return that something was not looked at."""
    return Finding(Verdict.SKIPPED, subject, why)


def warning(subject: str, what: str, fix: str) -> Finding:
    """Return what could be better."""
    return Finding(Verdict.WARNING, subject, what, fix)


def failed(subject: str, what: str, fix: str) -> Finding:
    """Return what does not work."""
    return Finding(Verdict.FAILED, subject, what, fix)
