"""Request and answer structs of the two APIs; no HTTP, no engine."""
