"""Finding: what one check of ``zccp doctor`` saw. Owns its form and how people read it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, how it ended, what was seen and, where it failed, what to do.

    Of a failed one ``evidence`` begins with the cause.
    """

    name: str
    state: State
    evidence: str
    remedy: str = ""


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """The findings for people, a line each."""
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        yield f"{finding.state:<12} {finding.name:<9} {finding.evidence}{remedy}"
