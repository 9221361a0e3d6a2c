"""One module an endpoint family; each gives route handlers that close over ``Services``."""
