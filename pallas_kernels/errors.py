"""ContractError: what every op raises when its arguments break the contract."""


class ContractError(ValueError):
    """An argument of an op has the wrong shape, dtype or value; the message names it, the bound and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise ``ContractError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ContractError(message)
