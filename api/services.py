"""Everything the routes work with, gathered once.

Owns nothing; holds what ``create_app`` was given so that routes take one argument and there are no globals.
"""

from dataclasses import dataclass

from api.errors import NotReadyError, UnknownModelError, quoted
from api.ports import Answers, Generator, KeyRing, ModelCard, Observer, Quota, TextCodec
from api.settings import ApiSettings, Clock


@dataclass(frozen=True, slots=True)
class Services:
    """The seams of one app, see ``api.ports``."""

    generator: Generator
    codec: TextCodec
    card: ModelCard
    keys: KeyRing
    quota: Quota
    observer: Observer
    settings: ApiSettings
    clock: Clock
    answers: Answers | None = None

    def require_model(self, name: str) -> None:
        """Refuse a name that is neither the served model's nor one of its aliases.

        Raises:
            UnknownModelError: no such model; the message names what there is.
        """
        if name != self.card.name and name not in self.card.aliases:
            raise UnknownModelError(
                f"model {quoted(name)} is not served here; use {quoted(self.card.name)} or see /v1/models",
                param="model",
            )

    def require_ready(self) -> None:
        """Refuse work that could not begin now.

        Raises:
            NotReadyError: the engine is not ready or this process is draining.
        """
        if self.settings.draining():
            raise NotReadyError("this server is shutting down; send the request again, another one will take it")
        status = self.generator.status()
        if status.state != "ready":
            raise NotReadyError(
                f"the engine is {status.state}: {status.reason or 'no reason given'}; try again shortly"
            )
